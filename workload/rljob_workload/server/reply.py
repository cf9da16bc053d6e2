"""OpenAI's answers, without any I/O: how what the engine said looks to a client, whole and as a stream's events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rljob_workload.algorithm.batch import Answer, Sampling
from rljob_workload.server.openai import Ask, Limits


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer's text, and why it ends."""

    text: str
    reason: str


def ended(answer: Answer, sampling: Sampling, limits: Limits) -> Ended:
    """The text without the stop text and the end token that ended it."""
    text = str(limits.tokenizer.decode(answer.tokens))
    if limits.eos is not None and answer.tokens[-1] == limits.eos:
        return Ended(text, "stop")
    for stop in sampling.stop:
        if text.endswith(stop):
            return Ended(text[: -len(stop)], "stop")
    return Ended(text, "length")


def respond(ask: Ask, answers: Sequence[Sequence[Answer]], limits: Limits, name: str, created: int) -> dict[str, Any]:
    """The answer's object. `answers`: of each prompt."""
    chat = ask.kind == "chat.completions"
    choices = []
    for place, (prompt, several) in enumerate(zip(ask.prompts, answers, strict=True)):
        for number, answer in enumerate(several):
            choices.append(_choice(ask, prompt, answer, limits, place * ask.n + number))
    generated = sum(len(answer.tokens) for several in answers for answer in several)
    read_ = sum(map(len, ask.prompts))
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": limits.model,
        "choices": choices,
        "usage": {"prompt_tokens": read_, "completion_tokens": generated, "total_tokens": read_ + generated},
    }


def _choice(ask: Ask, prompt: tuple[int, ...], answer: Answer, limits: Limits, index: int) -> dict[str, Any]:
    end = ended(answer, ask.sampling, limits)
    chat = ask.kind == "chat.completions"
    choice: dict[str, Any] = {"index": index, "finish_reason": end.reason, "policy_versions": answer.versions}
    choice |= {"message": {"role": "assistant", "content": end.text}} if chat else {"text": end.text}
    choice["logprobs"] = _logprobs_of(answer, limits, chat=chat) if ask.logprobs else None
    if ask.token_ids:
        choice |= {"prompt_token_ids": prompt, "token_ids": answer.tokens}
    return choice


def _logprobs_of(answer: Answer, limits: Limits, *, chat: bool) -> dict[str, Any]:
    words = [str(limits.tokenizer.decode([token])) for token in answer.tokens]
    if chat:
        return {
            "content": [
                {"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []}
                for word, logprob in zip(words, answer.logprobs, strict=True)
            ],
            "refusal": None,
        }
    offsets = [0]
    for word in words:
        offsets.append(offsets[-1] + len(word))
    return {"tokens": words, "token_logprobs": answer.logprobs, "top_logprobs": None, "text_offset": offsets[:-1]}


def chunks(ask: Ask, whole: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answer as stream events. An engine hands over complete answers, so each choice is one piece and its end."""
    chat = ask.kind == "chat.completions"
    head = {name: whole[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    events: list[dict[str, Any]] = []
    for choice in whole["choices"]:
        extra = {name: value for name, value in choice.items() if name not in ("message", "text", "finish_reason", "index")}
        body = {"delta": choice["message"]} if chat else {"text": choice["text"]}
        events.append({**head, "choices": [{"index": choice["index"], **body, **extra, "finish_reason": None}]})
        last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        end = {"index": choice["index"], **last, "logprobs": None, "finish_reason": choice["finish_reason"]}
        events.append({**head, "choices": [end]})
    if ask.stream_usage:
        events.append({**head, "choices": [], "usage": whole["usage"]})
    return events
