"""OpenAI's requests, without any I/O: what may be asked, and in which words it is refused.

Every parameter is in exactly one of three tables: served, ignored, or taken at its neutral value only. Others are refused, so
that nobody believes that something has an effect which has none. Nothing that an engine could not do passes from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api import spec
from rljob_workload.algorithm.batch import Sampling
from rljob_workload.core.trajectory import Message, Trajectory, TurnError
from rljob_workload.server.errors import bad

_SHARED = frozenset(
    {"model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "logprobs", "stop", "seed"}
    | {"return_token_ids", "prompt_token_ids"}
)
#: Parameters that do something, by endpoint.
SERVED = {
    "completions": _SHARED | {"prompt"},
    "chat.completions": _SHARED | {"messages", "max_completion_tokens"},
}
#: Parameters that say something about the client, not about the answer.
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
#: Parameters that are taken at these values only.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
}
ROLES = ("system", "developer", "user", "assistant", "tool")
#: Answers that one request may ask for.
MOST_ANSWERS = 128
MOST_STOPS = 16
_SEEDS = 2**63
#: Logits are divided by the temperature in float32, where a smaller one could make them infinite. 0 is greedy.
LEAST_TEMPERATURE = float(spec.LEAST_TEMPERATURE)
#: A smaller one could be 0 in float32, which an engine takes for `no limit`.
LEAST_TOP_P = 1e-6


@dataclass(frozen=True, slots=True)
class Limits:
    """What the job's engine and tokenizer allow."""

    model: str
    #: The job's own: an answer's tokens by default and at most, and those of prompt and answer.
    new_tokens: int
    most_new_tokens: int
    sequence: int
    temperature: float
    vocabulary: int
    eos: int | None
    tokenizer: Any

    def encode(self, text: str, param: str) -> tuple[int, ...]:
        """Tokens of a text, without the begin token. Raises ApiError."""
        try:
            text.encode()  # JSON may hold half a surrogate pair
            return tuple(self.tokenizer.tokenize(text))
        except KeyError as err:
            raise bad(f"{param}: {err.args[0]!r} is not in the model's alphabet", param) from None
        except UnicodeEncodeError as err:
            raise bad(f"{param}: {text[err.start]!r} is no character", param) from None

    @property
    def begin(self) -> tuple[int, ...]:
        """What stands before every prompt that is given as text, once."""
        return (int(self.tokenizer.bos),)


@dataclass(frozen=True, slots=True)
class Ask:
    """One checked request."""

    kind: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: Sampling
    stream: bool
    stream_usage: bool
    logprobs: bool
    token_ids: bool
    #: What the rollout remembers, where the prompt was given so.
    text: str | None = None
    messages: tuple[Message, ...] | None = None


def read(kind: str, body: Mapping[str, Any], limits: Limits, trajectory: Trajectory | None = None) -> Ask:
    """Check a request. `trajectory`: of the rollout that it is a turn of. Raises ApiError naming the field."""
    _known(kind, body)
    body = {name: value for name, value in body.items() if value is not None}  # clients send null for what they leave out
    model = body.get("model", limits.model)
    if model != limits.model:
        raise bad(f"model: {str(model)[:80]!r} is not served; {limits.model!r} is", "model")
    n = _integer(body, "n", 1, 1, MOST_ANSWERS)
    if trajectory is not None and n != 1:
        raise bad(f"n: {n} answers in a rollout; a rollout is one, so 1 would do", "n")
    prompts, text, messages = _prompts(kind, body, limits, trajectory)
    if len(prompts) * n > MOST_ANSWERS:
        raise bad(f"{len(prompts)} prompts with n {n} are {len(prompts) * n} answers; at most {MOST_ANSWERS}", "n")
    longest = max(map(len, prompts))
    sampling = _sampling(body, limits, longest)
    options = body.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise bad("stream_options: must be an object", "stream_options")
    return Ask(
        kind,
        prompts,
        n,
        sampling,
        stream=_flag(body, "stream"),
        stream_usage=_flag(options, "include_usage", "stream_options"),
        logprobs=_logprobs(kind, body),
        token_ids=_flag(body, "return_token_ids"),
        text=text,
        messages=messages,
    )


def _known(kind: str, body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in SERVED[kind] or name in IGNORED:
            continue
        if name not in NEUTRAL:
            raise bad(f"{name[:80]}: unknown parameter of {kind}", name[:80])
        if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL[name]):
            raise bad(f"{name}: {str(value)[:80]} is not supported; {NEUTRAL[name][-1]!r} is", name)


# ---- prompts ------------------------------------------------------------------------------------


def _prompts(
    kind: str, body: Mapping[str, Any], limits: Limits, trajectory: Trajectory | None
) -> tuple[tuple[tuple[int, ...], ...], str | None, tuple[Message, ...] | None]:
    param = "prompt" if kind == "completions" else "messages"
    given = body.get("prompt_token_ids", body.get(param))
    if given is None:
        raise bad(f"{param}: is missing", param)
    turns = trajectory if trajectory is not None else Trajectory()
    text, messages = None, None
    try:
        if "prompt_token_ids" in body:
            found = [turns.begin_with_tokens(_ids(given, "prompt_token_ids", limits))]
        elif kind == "chat.completions":
            messages = _messages(given)
            found = [
                turns.begin_with_messages(messages, limits.tokenizer.chat, lambda t: limits.encode(t, param), limits.begin)
            ]
        elif isinstance(given, str):
            text = given
            found = [turns.begin_with_text(text, lambda t: limits.encode(t, param), limits.begin)]
        else:
            found = [_one(part, turns, limits) for part in _several(given, trajectory)]
    except TurnError as err:
        raise bad(str(err), param) from err
    for tokens in found:
        if not tokens:
            raise bad(f"{param}: has no tokens; at least one would do", param)
    return tuple(found), text, messages


def _several(given: Any, trajectory: Trajectory | None) -> list[Any]:
    """A list of token ids is one prompt; a list of texts or of such lists is several."""
    if not isinstance(given, list) or not given:
        raise bad("prompt: must be a text, a list of token ids, or a list of such", "prompt")
    if isinstance(given[0], (str, list)):
        if trajectory is not None and len(given) != 1:
            raise bad(f"prompt: {len(given)} prompts in a rollout; a turn has one", "prompt")
        return given
    return [given]


def _one(part: Any, turns: Trajectory, limits: Limits) -> tuple[int, ...]:
    if isinstance(part, str):
        return turns.begin_with_text(part, lambda text: limits.encode(text, "prompt"), limits.begin)
    return turns.begin_with_tokens(_ids(part, "prompt", limits))


def _ids(given: Any, param: str, limits: Limits) -> tuple[int, ...]:
    if not isinstance(given, list):
        raise bad(f"{param}: must be a list of token ids", param)
    for place, token in enumerate(given):
        if type(token) is not int or not 0 <= token < limits.vocabulary:
            raise bad(f"{param}[{place}]: {str(token)[:40]} is no token id from 0 to {limits.vocabulary - 1}", param)
    return tuple(given)


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise bad("messages: must be a list of at least one message", "messages")
    return tuple(_message(message, f"messages[{place}]") for place, message in enumerate(given))


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping):
        raise bad(f"{where}: must be an object with role and content", "messages")
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise bad(f"{where}.role: {str(role)[:40]!r} is none of {', '.join(ROLES)}", "messages")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
        content = None if None in parts else "".join(map(str, parts))
    if not isinstance(content, str):
        raise bad(f"{where}.content: must be a text", "messages")
    return {"role": str(role), "content": content}


# ---- sampling -----------------------------------------------------------------------------------


def _sampling(body: Mapping[str, Any], limits: Limits, longest: int) -> Sampling:
    room = limits.sequence - longest
    if room < 1:
        raise bad(
            f"the prompt has {longest} tokens, which leaves no room for an answer in generation.maxSequenceLength "
            f"{limits.sequence}",
            "prompt",
        )
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    new = _integer(body, name, min(limits.new_tokens, room), 1, limits.most_new_tokens)
    if new > room:
        raise bad(
            f"{name}: {new} with a prompt of {longest} tokens exceed generation.maxSequenceLength {limits.sequence}; {room} "
            "would do",
            name,
        )
    temperature = _number(body, "temperature", limits.temperature, 0.0, 100.0)
    if 0.0 < temperature < LEAST_TEMPERATURE:
        raise bad(
            f"temperature: {temperature:g} is too small to divide by; 0 (greedy) or at least {LEAST_TEMPERATURE:g} would do",
            "temperature",
        )
    top_p = _number(body, "top_p", 1.0, 0.0, 1.0)
    if top_p < LEAST_TOP_P:
        raise bad(f"top_p: {top_p:g} leaves no token; temperature 0 takes the likeliest", "top_p")
    seed = None if body.get("seed") is None else _integer(body, "seed", 0, -_SEEDS, _SEEDS - MOST_ANSWERS)
    return Sampling(
        new,
        temperature=1.0 if temperature == 0.0 else temperature,
        top_p=top_p,
        greedy=temperature == 0.0,
        stop=_stops(body, limits),
        seed=seed,
    )


def require_trained_sampling(sampling: Sampling, limits: Limits) -> None:
    """Answers of a rollout are trained as samples of the policy, so they must be. Raises ApiError."""
    if sampling.greedy or sampling.temperature != limits.temperature:
        found = 0.0 if sampling.greedy else sampling.temperature
        raise bad(
            f"temperature: {found:g} in a rollout that is trained; answers are sampled with generation.temperature "
            f"{limits.temperature:g}, leave it out (the server's own /v1 takes any)",
            "temperature",
        )
    if sampling.top_p != 1.0:
        raise bad(f"top_p: {sampling.top_p:g} in a rollout that is trained; leave it out", "top_p")


def _stops(body: Mapping[str, Any], limits: Limits) -> tuple[str, ...]:
    given = body.get("stop")
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise bad(f"stop: must be a text or a list of at most {MOST_STOPS} texts, none of them empty", "stop")
    for stop in stops:
        limits.encode(stop, "stop")
    return tuple(stops)


def _logprobs(kind: str, body: Mapping[str, Any]) -> bool:
    given = body.get("logprobs")
    if kind == "chat.completions":
        return _flag(body, "logprobs")
    if given is not None and (type(given) is bool or given not in (0, 1)):
        raise bad(f"logprobs: {str(given)[:40]} is not supported; 1 (the sampled token's) is", "logprobs")
    return given is not None


def _flag(body: Mapping[str, Any], name: str, inside: str | None = None) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        where = f"{inside}.{name}" if inside else name
        raise bad(f"{where}: {str(value)[:40]} is not true or false", inside or name)
    return bool(value)


def _integer(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise bad(f"{name}: {str(value)[:40]} is no integer from {least} to {most}", name)
    return value


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not least <= value <= most:  # an integer may be too large for a float
        raise bad(f"{name}: {str(value)[:40]} is no number from {least:g} to {most:g}", name)
    return float(value)
