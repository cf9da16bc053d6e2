"""Groups: one prompt with its G answers, while they arrive, when they are finished, and in a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rljob_workload.algorithm.batch import Answer


class Scored(NamedTuple):
    """An answer with the environment's verdict."""

    answer: Answer
    reward: float
    correct: bool


@dataclass(slots=True)
class Group:
    """One prompt being answered."""

    ordinal: int
    #: Tries before this one, in this life; with the ordinal it tells this try's answers from those of earlier ones.
    attempt: int
    dispatched_version: int
    #: When it was dispatched.
    begun: float
    #: When it is given up; infinity while nobody is at it.
    deadline: float
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """One prompt with all its answers, waiting to be trained."""

    ordinal: int
    answers: tuple[Scored, ...]
    #: The version that sampled the group's oldest token.
    first_version: int

    @classmethod
    def of(cls, ordinal: int, answers: Sequence[Scored]) -> FinishedGroup:
        """The group of these answers."""
        return cls(ordinal, tuple(answers), min(scored.answer.first_version for scored in answers))

    @property
    def teaches(self) -> bool:
        """Whether the rewards differ: in a group of equal rewards every advantage is zero."""
        first = self.answers[0].reward
        return any(scored.reward != first for scored in self.answers)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What went into one training step, in numbers."""

    #: Mean over all answers that were judged for this step, those of filtered groups included.
    reward: float
    correct: float
    #: Answers that are trained.
    samples: int
    answer_tokens: int
    #: Answers whose tokens come from more than one policy version.
    spanning: int
    #: Versions between a group's first token and this step: over the step's groups.
    oldest_age: int
    mean_age: float
    #: Prompts whose equal rewards taught nothing, since the step before.
    filtered: tuple[int, ...] = ()
    #: Groups of each age, youngest first.
    ages: tuple[tuple[int, int], ...] = ()


def step_info(groups: Sequence[FinishedGroup], version: int, filtered: Sequence[FinishedGroup] = ()) -> StepInfo:
    """The numbers of a step over `groups`, for which `filtered` were answered too."""
    trained = [scored for group in groups for scored in group.answers]
    judged = trained + [scored for group in filtered for scored in group.answers]
    ages = [version - group.first_version for group in groups]
    return StepInfo(
        reward=sum(scored.reward for scored in judged) / len(judged),
        correct=sum(scored.correct for scored in judged) / len(judged),
        samples=len(trained),
        answer_tokens=sum(len(scored.answer.logprobs) for scored in trained),
        spanning=sum(scored.answer.first_version != scored.answer.last_version for scored in trained),
        oldest_age=max(ages),
        mean_age=sum(ages) / len(ages),
        filtered=tuple(group.ordinal for group in filtered),
        ages=tuple(sorted(Counter(ages).items())),
    )


def group_to_json(group: FinishedGroup) -> dict[str, Any]:
    """A finished group for the checkpoint."""
    return {
        "ordinal": group.ordinal,
        "attempt": group.answers[0].answer.tag[1],
        "answers": [_scored_to_json(scored) for scored in group.answers],
    }


def _scored_to_json(scored: Scored) -> dict[str, Any]:
    answer = scored.answer
    data: dict[str, Any] = {
        "tokens": answer.tokens,
        "logprobs": answer.logprobs,
        "versions": answer.versions,
        "reward": scored.reward,
        "correct": scored.correct,
    }
    return data | ({} if answer.prompt is None else {"prompt": answer.prompt, "spans": answer.spans})


def group_from_json(data: Mapping[str, Any]) -> FinishedGroup:
    """The inverse of `group_to_json`. Raises KeyError, TypeError or ValueError for anything else."""
    tag = (int(data["ordinal"]), int(data["attempt"]))
    answers = []
    for saved in data["answers"]:
        versions = tuple((int(index), int(version)) for index, version in saved["versions"])
        if not versions:
            raise ValueError("an answer without versions")
        spans = tuple((int(start), int(stop)) for start, stop in saved.get("spans", ()))
        prompt = tuple(saved["prompt"]) if "prompt" in saved else None
        answer = Answer(tag, tuple(saved["tokens"]), tuple(saved["logprobs"]), versions, spans, prompt)
        answers.append(Scored(answer, float(saved["reward"]), bool(saved["correct"])))
    return FinishedGroup.of(tag[0], answers)
