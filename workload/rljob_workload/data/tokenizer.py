"""The tokenizer of the built-in digit tasks: one token per character."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PAD, BOS, EOS = 0, 1, 2
_CHARACTERS = "0123456789=.+-:"
_FIRST = 3


class DigitTokenizer:
    """Characters to ids and back; ids 0 to 2 are padding, begin and end.

    Besides encode and decode it carries the attributes that Megatron's generation controller asks of a tokenizer.
    """

    vocab_size = _FIRST + len(_CHARACTERS)
    pad = PAD
    bos = bos_token_id = BOS
    eod = eos_id = eos_token_id = EOS

    def __init__(self) -> None:
        self._ids = {c: i for i, c in enumerate(_CHARACTERS, start=_FIRST)}
        self._characters = {i: c for c, i in self._ids.items()}

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt's tokens, with the begin token in front."""
        return (BOS, *(self._ids[c] for c in text))

    def decode(self, ids: Iterable[int]) -> str:
        """An answer's text: up to the end token; ids outside the alphabet show as '?'."""
        text = ""
        for token in ids:
            if token == EOS:
                break
            text += self._characters.get(int(token), "?")
        return text

    def chat(self, messages: Iterable[Mapping[str, str]]) -> str:
        """Messages as one text: their contents, one behind the other; the digits' alphabet has no marks for roles."""
        return "".join(message["content"] for message in messages)

    # ---- what Megatron's controller calls ---------------------------------------------------

    def tokenize(self, text: str) -> list[int]:
        """Megatron's name for encoding without the begin token."""
        return [self._ids[c] for c in text]

    def detokenize(self, ids: Sequence[int], **_: Any) -> str:
        """Megatron's name for decoding."""
        return self.decode(ids)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Start of every token in the text: one character each."""
        return list(range(len(ids)))
