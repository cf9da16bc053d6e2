"""Every point at which a machine can stop or a process be overtaken, enumerated: what is read next is whole and right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_workload.core.checkpoint import Checkpoint, CheckpointError, FencedError, RunDirectory
from rljob_workload.core.store.errors import InvalidCheckpointError
from rljob_workload.core.store.filesystem import Files

from .builders import COLLECTOR, owner, save
from .volatile import StoppedError, Turns, VolatileFiles

ROOT = Path("/run")
#: More operations than anything takes.
ALONE = 10**6


def directory(files: Files) -> RunDirectory:
    return RunDirectory(ROOT, files)


def begin_attempt(files: Files, attempt: int, unloadable: frozenset[str] = frozenset()) -> tuple[int, str | None]:
    """What the preflight does: choose, take the token, look again. Returns token and checkpoint."""
    run = directory(files)
    for _ in range(8):
        choice = run.choose("Full", unloadable, taker=owner(attempt))
        if choice.name is None and any(one.on_lineage for one in choice.passed_over):
            raise CheckpointError("corrupt")
        entry = run.take_token(owner(attempt), choice.name)
        if choice.name is None or run.still_there(choice.name):
            return entry.token, choice.name
    raise AssertionError("never settles")


def chosen(files: Files) -> str | None:
    return directory(files).choose("Full").name


def with_steps(*steps: int) -> VolatileFiles:
    """Token 1 with these checkpoints, all of it on disk."""
    files = VolatileFiles()
    assert begin_attempt(files, 1) == (1, None)
    for step in steps:
        save(directory(files), step)
    return files.settled()


@pytest.fixture(scope="module")
def base() -> VolatileFiles:
    return with_steps(10, 20, 30)


@pytest.fixture(scope="module")
def one() -> VolatileFiles:
    return with_steps(30)


def each_crash(
    base: VolatileFiles, work: Callable[[VolatileFiles], object], check: Callable[[VolatileFiles, bool], None]
) -> int:
    """Stop `work` after each of its operations; `check` every state that may be found. Returns how many there were."""
    seen, point = set(), 0
    while True:
        files = base.clone()
        files.power = point
        try:
            work(files)
            over = True
        except StoppedError:
            over = False
        for found in files.after_power_loss():
            if (picture := (found.picture(), over)) not in seen:
                seen.add(picture)
                check(found, over)
        if over:
            return len(seen)
        point += 1


def whole(files: VolatileFiles) -> Checkpoint:
    name = chosen(files)
    assert name is not None
    found = directory(files).load(name, "Full")
    assert found.state["collector"] == COLLECTOR
    return found


def test_a_crash_anywhere_in_a_save_leaves_the_previous_or_the_new_checkpoint(one: VolatileFiles) -> None:
    def check(found: VolatileFiles, over: bool) -> None:
        step = whole(found).step
        assert step == 40 if over else step in (30, 40)
        token, name = begin_attempt(found, 2)
        directory(found).remove_unfinished(token)
        assert not [text for text in found.entries("") if text.startswith(".tmp-step")]
        assert chosen(found) == name
        save(directory(found), step + 1, token, writer=owner(2))
        assert whole(found).step == step + 1

    assert each_crash(one, lambda files: save(directory(files), 40), check) > 100


def test_a_crash_anywhere_in_a_deletion_leaves_the_newest_checkpoint(base: VolatileFiles) -> None:
    def check(found: VolatileFiles, over: bool) -> None:
        assert whole(found).step == 30
        token, _ = begin_attempt(found, 2)
        directory(found).remove_unfinished(token)
        assert not [text for text in found.entries("") if text.startswith(".tmp-gone")]
        if over:
            assert [text for text in found.entries("") if text.startswith("step-")] == ["step-000030-t000001"]

    assert each_crash(base, lambda files: directory(files).prune(1, 1), check) > 50


def test_a_crash_anywhere_in_taking_a_token_loses_no_token_that_was_given(one: VolatileFiles) -> None:
    def check(found: VolatileFiles, over: bool) -> None:
        fence = directory(found).fence()
        tokens = [entry.token for entry in fence.entries]
        assert tokens in ([1], [1, 2])
        if over:
            assert tokens == [1, 2]
        assert whole(found).step == 30
        assert begin_attempt(found, 2) == (2, "step-000030-t000001")  # the same attempt, started again
        assert begin_attempt(found, 3) == (3, "step-000030-t000001")

    assert each_crash(one, lambda files: begin_attempt(files, 2), check) > 10


def test_a_crash_anywhere_in_the_first_life_of_a_directory_is_a_fresh_start_or_its_checkpoint() -> None:
    def life(files: VolatileFiles) -> None:
        token, name = begin_attempt(files, 1)
        assert name is None
        save(directory(files), 5, token)

    def check(found: VolatileFiles, over: bool) -> None:
        token, name = begin_attempt(found, 2)
        assert name in (None, "step-000005-t000001")
        if over:
            assert (token, name) == (2, "step-000005-t000001")

    each_crash(VolatileFiles(), life, check)


# ---- overtaken ------------------------------------------------------------------------------------


def turning_points(base: VolatileFiles, work: Callable[[Files], object]) -> list[int]:
    """Numbers of operations after which somebody else may have come: before and after each one that changes something."""
    turns = Turns(base.clone(), ALONE, ALONE)
    turns.run(work, lambda _: None)
    changes = [number for number, name in enumerate(turns.trace) if name not in ("entries", "stat", "read", "digest")]
    return sorted({0, len(turns.trace), *changes, *(number + 1 for number in changes)})


def each_meeting(
    base: VolatileFiles,
    first: Callable[[Files], object],
    second: Callable[[Files], object],
    check: Callable[[VolatileFiles, object, object], None],
) -> int:
    """`first` is stopped at each of its turning points; `second` runs, and is itself stopped at each of its own while `first`
    ends. Returns how many meetings there were."""
    meetings = 0
    firsts, seconds = (turning_points(base, work) for work in (first, second))
    for until in firsts:
        for second_until in seconds:
            files = base.clone()
            check(files, *Turns(files, until, second_until).run(first, second))
            meetings += 1
    return meetings


def test_a_writer_that_is_overtaken_anywhere_in_its_save_is_never_read(one: VolatileFiles) -> None:
    def check(files: VolatileFiles, saved: object, begun: object) -> None:
        assert isinstance(begun, tuple)
        token, name = begun
        assert isinstance(saved, Checkpoint | FencedError)
        assert (token, chosen(files)) == (2, name)
        if name == "step-000030-t000001" and isinstance(saved, Checkpoint):
            assert saved.name in files.entries("")  # it is there, and not read
            assert "its writer was overtaken" in directory(files).choose().passed_over[0].why
        save(directory(files), 50, token, writer=owner(2))
        assert chosen(files) == "step-000050-t000002"

    assert each_meeting(one, lambda files: save(directory(files), 40), lambda files: begin_attempt(files, 2), check) > 200


@pytest.mark.parametrize("unloadable", [[], [30], [30, 20]])
def test_what_an_attempt_goes_on_from_survives_a_writer_that_was_about_to_delete_it(
    base: VolatileFiles, unloadable: list[int]
) -> None:
    passed_over = frozenset(f"step-{step:06d}-t000001" for step in unloadable)

    def check(files: VolatileFiles, pruned: object, begun: object) -> None:
        assert isinstance(pruned, list | FencedError), pruned
        assert directory(files).load("step-000030-t000001", "Full")  # the newest is never deleted
        if isinstance(begun, tuple):
            assert directory(files).load(begun[1], "Full")
        else:  # what it could have gone on from was deleted before
            assert isinstance(begun, CheckpointError)
            assert len(unloadable) > 0

    assert each_meeting(
        base, lambda files: directory(files).prune(1, 1), lambda files: begin_attempt(files, 2, passed_over), check
    )


def test_two_that_take_a_token_at_the_same_time_get_different_ones(one: VolatileFiles) -> None:
    def check(files: VolatileFiles, first: object, second: object) -> None:
        assert isinstance(first, tuple)
        assert isinstance(second, tuple)
        assert sorted((first[0], second[0])) == [2, 3]
        assert [entry.token for entry in directory(files).fence().entries] == [1, 2, 3]

    def take(uid: str) -> Callable[[Files], object]:
        return lambda files: (directory(files).take_token(owner(1, uid), "step-000030-t000001").token,)

    assert each_meeting(one, take("u2"), take("u3"), check) > 50


def test_an_overtaken_writer_deletes_nothing_and_cleans_nothing_up(base: VolatileFiles) -> None:
    files = base.clone()
    directory(files).begin(40, 1)
    assert begin_attempt(files, 2)[0] == 2
    before = files.picture()
    for attempt in (
        lambda: directory(files).prune(1, 1),
        lambda: directory(files).remove_unfinished(1),
        lambda: directory(files).begin(50, 1),
        lambda: directory(files).publish(ROOT / ".tmp-step-000040-t000001", 40, 1, {}),
    ):
        with pytest.raises(FencedError, match="token 1 is overtaken: attempt 2 of default/copy"):
            attempt()
    assert {path for path, _ in before} <= {path for path, _ in files.picture()}
    assert directory(files).remove_unfinished(2) == [".tmp-step-000040-t000001"]


def test_nothing_is_deleted_before_the_new_attempt_s_first_save(base: VolatileFiles) -> None:
    files = base.clone()
    begin_attempt(files, 2)
    assert directory(files).prune(1, 2) == []
    save(directory(files), 40, 2, writer=owner(2))
    assert directory(files).prune(1, 2) == [f"step-0000{step}-t000001" for step in (10, 20, 30)]


def test_a_broken_first_save_does_not_count_as_one(base: VolatileFiles) -> None:
    files = base.clone()
    begin_attempt(files, 2)
    save(directory(files), 40, 2, writer=owner(2))
    files.remove_file("step-000040-t000002/random.json")
    assert directory(files).prune(1, 2) == []
    with pytest.raises(InvalidCheckpointError, match=r"random\.json is missing"):
        directory(files).load("step-000040-t000002")


def test_superseded_checkpoints_go_and_invalid_ones_stay(base: VolatileFiles) -> None:
    files = base.clone()
    assert begin_attempt(files, 2, frozenset({"step-000030-t000001"})) == (2, "step-000020-t000001")
    files.remove_file("step-000010-t000001/MANIFEST.json")
    save(directory(files), 25, 2, writer=owner(2))
    assert directory(files).prune(2, 2) == ["step-000030-t000001"]
    left = sorted(text for text in files.entries("") if text.startswith("step-"))
    assert left == ["step-000010-t000001", "step-000020-t000001", "step-000025-t000002"]


def test_what_an_overtaken_writer_left_half_deleted_is_brought_back(base: VolatileFiles) -> None:
    """It stopped between renaming a checkpoint aside and renaming it back; the new attempt has chosen that one meanwhile."""
    files = base.clone()
    run, name = directory(files), "step-000030-t000001"
    assert run.choose().name == name
    assert run.take_token(owner(2), name).token == 2
    files.rename(name, f".tmp-gone-t000001-{name}")
    assert run.still_there(name)
    assert chosen(files) == name
    assert not run.still_there("step-000099-t000001")


def test_what_the_holder_of_the_token_is_writing_is_left_to_it(base: VolatileFiles) -> None:
    files = base.clone()
    directory(files).begin(40, 1)
    assert directory(files).remove_unfinished(1) == []
    files.make_directory(".tmp-of-somebody-else")
    begin_attempt(files, 2)
    assert directory(files).remove_unfinished(2) == [".tmp-step-000040-t000001"]
    assert ".tmp-of-somebody-else" in files.entries("")


def test_a_volume_that_is_full_at_any_point_of_a_save_keeps_the_previous_checkpoint_and_gives_the_room_back(
    one: VolatileFiles,
) -> None:
    refused = 0
    for room in range(100):
        files = one.clone()
        files.room = room
        try:
            save(directory(files), 40)
            break
        except CheckpointError as err:
            assert "No space left on device" in str(err)  # noqa: PT017
            refused += 1
        except OSError as err:
            assert err.strerror == "No space left on device"  # noqa: PT017 - the ranks' own files, in the trainer's hands
            directory(files).discard(ROOT / ".tmp-step-000040-t000001")
        assert whole(files).step == 30
        assert not [text for text in files.entries("") if text.startswith(".tmp")]
        files.room = None
        save(directory(files), 40)
        assert whole(files).step == 40
    assert refused > 5
