"""What one rollout of an agent has said so far: prompts and answers, joined to one sequence of tokens.

The trainer takes no token from an agent as generated. It keeps what the engine generated, with log-probs and versions, and
lets a turn begin only where its prompt goes on from everything before: otherwise the tokens trained would not be those that
the policy saw. Text and messages of earlier turns are replaced by the tokens that they stand for, so that re-encoding cannot
change them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rljob_workload.algorithm.batch import Answer, Versions

#: Text to tokens, without the begin token.
Encode = Callable[[str], Sequence[int]]
Message = Mapping[str, str]


class TurnError(Exception):
    """The agent's next turn does not follow from the ones before; the message says where they part."""


@dataclass(frozen=True, slots=True)
class LastTurn:
    """A turn whose answer may not have reached the agent."""

    prompt: tuple[int, ...]
    answer: Answer
    text: str | None
    messages: list[dict[str, str]] | None


@dataclass(slots=True)
class Trajectory:
    """Turns of one rollout. Prompts of a turn: `begin_with_*` gives its tokens; `end` adds the answer."""

    #: The first turn's prompt.
    prompt: tuple[int, ...] = ()
    #: Behind it, up to the last generated token.
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    #: The same as text and as messages, where the last turn was given so.
    text: str | None = None
    messages: list[dict[str, str]] | None = None
    #: The last turn as it was asked, and its answer: asked again, it is answered with the same.
    last: LastTurn | None = None

    @property
    def turns(self) -> int:
        """Answers so far."""
        return len(self.spans)

    @property
    def so_far(self) -> tuple[int, ...]:
        """All tokens of prompt and turns."""
        return self.prompt + tuple(self.tokens)

    def begin_with_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """A prompt given as token ids. Raises TurnError."""
        before, given = self.so_far, tuple(tokens)
        if given[: len(before)] == before or self.repeats(given):
            return given
        shared = next((i for i, (a, b) in enumerate(zip(before, given, strict=False)) if a != b), min(len(before), len(given)))
        raise TurnError(
            f"the prompt of turn {self.turns + 1} does not go on from turn {self.turns}: token {shared} is "
            f"{_at(given, shared)}, prompt and answer so far ({len(before)} tokens) have {_at(before, shared)} there; send "
            "those tokens first (return_token_ids gives them), then what is new"
        )

    def begin_with_text(self, text: str, encode: Encode, bos: Sequence[int]) -> tuple[int, ...]:
        """A prompt given as text: what is new is encoded, the rest keeps its tokens. Raises TurnError."""
        if not self.turns:
            return (*bos, *encode(text))
        if self.text is None:
            raise TurnError(f"turn {self.turns} was not given as text; go on as it was given, or with token ids")
        if self.last is not None and text == self.last.text:
            return self.last.prompt
        if not text.startswith(self.text):
            raise TurnError(
                f"the prompt of turn {self.turns + 1} does not begin with prompt and answer of turn {self.turns} "
                f"({_shown(self.text)}); it is {_shown(text)}"
            )
        return (*self.so_far, *encode(text[len(self.text) :]))

    def begin_with_messages(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str], encode: Encode, bos: Sequence[int]
    ) -> tuple[int, ...]:
        """A prompt given as messages: the new ones are rendered and encoded, the others keep their tokens. Raises TurnError."""
        if not self.turns:
            return (*bos, *encode(render(messages)))
        if self.messages is None:
            raise TurnError(f"turn {self.turns} was not given as messages; go on as it was given, or with token ids")
        if self.last is not None and [dict(message) for message in messages] == self.last.messages:
            return self.last.prompt
        count = len(self.messages)
        if [dict(message) for message in messages[:count]] != self.messages:
            raise TurnError(
                f"the messages of turn {self.turns + 1} do not begin with the {count} messages so far, the last of which is "
                f"the answer of turn {self.turns} as it was given: {_shown(self.messages[-1]['content'])}"
            )
        return (*self.so_far, *encode(render(messages[count:])))

    def repeats(self, prompt: tuple[int, ...]) -> bool:
        """Whether this is the last turn's prompt again: its answer was lost on the way."""
        return self.last is not None and prompt == self.last.prompt

    def end(
        self,
        prompt: Sequence[int],
        answer: Answer,
        *,
        text: str | None = None,
        messages: Sequence[Message] | None = None,
        said: str = "",
    ) -> None:
        """The turn that began with `prompt` has this answer. `text`, `messages`: the prompt as given; `said`: the answer so."""
        if not self.turns:
            self.prompt = tuple(prompt)
        self.tokens = list(prompt[len(self.prompt) :])
        start = len(self.tokens)
        self.tokens += answer.tokens
        self.logprobs += answer.logprobs
        self.spans.append((start, len(self.tokens)))
        for place, version in answer.versions:
            if not self.versions or self.versions[-1][1] != version:
                self.versions.append((start + place, version))
        asked = None if messages is None else [dict(message) for message in messages]
        self.last = LastTurn(tuple(prompt), answer, text, asked)
        self.text = None if text is None else text + said
        self.messages = None if asked is None else [*asked, {"role": "assistant", "content": said}]

    def as_answer(self, tag: tuple[int, int]) -> Answer:
        """The whole as one answer to be trained. Without a turn there is none (ValueError)."""
        if not self.turns:
            raise ValueError("nothing was generated")
        versions: Versions = tuple(self.versions)
        return Answer(tag, tuple(self.tokens), tuple(self.logprobs), versions, tuple(self.spans), self.prompt)


def _at(tokens: Sequence[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "nothing"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:40]}…{text[-40:]}")
