"""What travels between the collector and the ranks arrives as it was sent."""

from __future__ import annotations

import pickle

from ray import cloudpickle

from rljob_workload.algorithm.batch import Answer, DecodeSlice, TrainBatch, TrainRow


def test_slices_and_batches_arrive_with_every_field() -> None:
    answers = (
        Answer((3, 0), (4, 5), (-0.5, -1.0), ((0, 7),)),
        Answer((4, 1), (4, 5, 6), (-0.5, -1.0), ((0, 7), (1, 8)), spans=((0, 1), (2, 3)), prompt=(1, 9)),
    )
    rows = (
        TrainRow((1, 4, 5), 1, (-0.5, -1.0), 0.25),
        TrainRow((1, 4, 5, 6), 1, (-0.5, -1.0), 0.25, current=True, spans=((1, 2), (3, 4))),
    )
    for sent in (DecodeSlice(answers, 3), TrainBatch(9, (3, 4), rows)):
        assert pickle.loads(cloudpickle.dumps(sent, protocol=5)) == sent
