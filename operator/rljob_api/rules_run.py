"""Rules on how a run goes: generation, in-flight prompts, checkpoints, deadlines, volumes, and what the dual mode needs."""

from __future__ import annotations

from collections.abc import Iterator

from . import sizes as s
from .expr import Expr, count, field, given, has, lift, when
from .layout import ACTOR_CALLS, CALLS_KEPT_FREE
from .names import CLIENT_PORT, DASHBOARD_PORT, GCS_PORT, PROGRESS_PORT
from .pattern import Pattern, PatternError
from .reasons import FAILURES, FINAL_FAILURES
from .rule import Clause, Rule, clause
from .spec import RLJobSpec


def _one_of(parent: str, *names: str) -> Clause:
    wanted = f"exactly one of {', '.join(names)}" if len(names) > 1 else names[0]
    found = given(parent, names)
    text = f"needs {wanted}; found" + "".join(f"{{{part}}}" for part in found)
    return clause(parent, count(parent, names).eq(1), text, **found)


def _dual(path: str, require: Expr, message: str, /, **values: Expr) -> Clause:
    return clause(path, ~s.INFERENCE_OPTIMIZED | require, message, **values)


#: Ports of the head pod that others listen on.
_TAKEN_PORTS = (
    (GCS_PORT, "Ray"),
    (DASHBOARD_PORT, "Ray's dashboard"),
    (PROGRESS_PORT, "the progress report"),
    (CLIENT_PORT, "Ray's client server"),
)


def _not_taken(taken: int, by: str) -> Clause:
    port = field("generation.server.port")
    return clause(
        "generation.server.port",
        (port > taken) | (port + s.DATA <= taken) | port.eq(0),
        f"{{port}} with {{replicas}} replicas takes port {taken}, which {by} listens on; more than {taken} would do, or 0",
        port=port,
        replicas=s.DATA,
    )


_CALLS = lift(ACTOR_CALLS - CALLS_KEPT_FREE)
_BY_CALLS = _CALLS // s.ANSWERS
_STALL = field("deadlines.stallSeconds")
_ACTIVE = field("deadlines.activeSeconds")


def _within_stall(path: str, what: str) -> Clause:
    return clause(
        "deadlines.stallSeconds",
        field(path) < _STALL,
        f"{{stall}} is over before {what} may be ({path} {{seconds}}); more than {{seconds}} would do",
        stall=_STALL,
        seconds=field(path),
    )


def _within_active(path: str, what: str) -> Clause:
    return clause(
        "deadlines.activeSeconds",
        ~has("deadlines.activeSeconds") | (field(path) < _ACTIVE),
        f"{{active}} is over before {what} may be ({path} {{seconds}}); more than {{seconds}} would do",
        active=_ACTIVE,
        seconds=field(path),
    )


def _period(path: str, what: str, parent: str | None = None) -> Clause:
    set_ = has(parent) if parent else lift(True)
    return clause(
        path,
        ~set_ | (field(path) <= field("algorithm.grpo.steps")),
        f"{{period}} is more than algorithm.grpo.steps {{steps}}: {what}",
        period=field(path),
        steps=field("algorithm.grpo.steps"),
    )


CHOICE_RULES: tuple[Rule, ...] = (
    Rule(
        "exactly-one",
        "ChoiceInvalid",
        "error",
        "Alternatives exclude each other, and one of them has to be chosen.",
        (
            _one_of("model", "preset", "huggingFace"),
            _one_of("data", "builtin", "jsonl", "parquet", "dataset"),
            _one_of("environment", "builtin", "agent"),
        ),
    ),
)


def _failure_rules(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    """Criteria that could never match, or a rule without any: each would do something else than its author thinks."""
    seen: set[str] = set()
    for index, rule in enumerate(spec.failure_policy.rules):
        path = f"spec.failurePolicy.rules[{index}]"
        if rule.name in seen:
            yield f"{path}.name", f"{rule.name!r} is the name of an earlier rule; status names the rule that decided"
        seen.add(rule.name)
        if not (rule.on_exit_codes or rule.on_reasons or rule.on_message_pattern):
            yield path, "has no criterion; onExitCodes, onReasons or onMessagePattern would do"
        for place, reason in enumerate(rule.on_reasons):
            if reason not in FAILURES:
                choices = ", ".join(one for one in FAILURES if one not in FINAL_FAILURES)
                yield f"{path}.onReasons[{place}]", f"{reason!r} is no failure reason; one of {choices} would do"
        try:
            Pattern(rule.on_message_pattern or "")
        except PatternError as error:
            yield f"{path}.onMessagePattern", str(error)


def _idle_failure_rules(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    """Reasons that no rule decides about: the job ends at them whatever a rule says."""
    for index, rule in enumerate(spec.failure_policy.rules):
        for place, reason in enumerate(rule.on_reasons):
            if reason in FINAL_FAILURES:
                path = f"spec.failurePolicy.rules[{index}].onReasons[{place}]"
                yield path, f"{reason} ends the job whatever a rule says; {_INSTEAD[reason]}"


_INSTEAD = {
    "ActiveDeadlineExceeded": "leave it out; a longer deadlines.activeSeconds gives the run more time",
    "ClusterRejected": "leave it out; the failure's message says what was refused",
}


def _agent_command(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    command = spec.environment.agent.command if spec.environment.agent is not None else []
    for place, word in enumerate(command):
        path = f"spec.environment.agent.command[{place}]"
        if "\0" in word:
            yield path, f"{word[:40]!r} has a null byte, with which no process can be started"
        elif place == 0 and not word.strip():
            yield path, f"{word[:40]!r} names no program; python would do"


RUN_RULES: tuple[Rule, ...] = (
    Rule(
        "agent-command",
        "AgentCommandInvalid",
        "error",
        "The agent's command names a program, and no word of it has a null byte.",
        check=_agent_command,
        reads=frozenset({"spec.environment.agent.command"}),
        deviation="Not Megatron's subject.",
    ),
    Rule(
        "failure-rules",
        "FailureRulesInvalid",
        "error",
        "Each rule has a name of its own and a criterion that can match; patterns are of a language that can't hang.",
        check=_failure_rules,
        reads=frozenset({"spec.failurePolicy.rules"}),
        deviation="Not Megatron's subject.",
    ),
    Rule(
        "failure-rules-idle",
        "FailureRulesInvalid",
        "warning",
        "A rule that names a failure which no rule decides about never acts on it.",
        check=_idle_failure_rules,
        reads=frozenset({"spec.failurePolicy.rules"}),
        deviation="Not Megatron's subject.",
    ),
    Rule(
        "inference-optimized",
        "InferenceOptimizedInvalid",
        "error",
        "The dual-mode model is Transformer Engine's (RMSNorm, no bias) in bfloat16, with Megatron's restrictions, and "
        "training it "
        "needs consent.",
        (
            _dual(
                "model.allowInferenceOptimizedTraining",
                field("model.allowInferenceOptimizedTraining"),
                "false does not go with generation.inferenceOptimized true: the same model is trained; set it to true "
                "to consent",
            ),
            _dual(
                "trainer.gpusPerNode",
                s.GPUS > 0,
                "{gpus} means CPU ranks, and inference-optimized layers generate with GPU kernels only "
                "(generation.inferenceOptimized true); set it to the GPUs of a node",
                gpus=s.GPUS,
            ),
            _dual(
                "model.transformer",
                s.TRANSFORMER_ENGINE,
                "{transformer} does not go with generation.inferenceOptimized true; TransformerEngine would do",
                transformer=field("model.transformer"),
            ),
            _dual(
                "model.dtype",
                field("model.dtype").eq("bfloat16"),
                "{dtype} does not go with generation.inferenceOptimized true; bfloat16 would do",
                dtype=field("model.dtype"),
            ),
            _dual(
                "parallelism.sequence",
                s.SEQUENCE | s.TENSOR.eq(1),
                "false does not go with generation.inferenceOptimized true and tensor {tensor}; set it to true",
                tensor=s.TENSOR,
            ),
            _dual(
                "parallelism.expertTensor",
                ~s.MOE | s.EXPERT_TENSOR.eq(1),
                "{tensor} does not go with generation.inferenceOptimized true: its experts are not split; set "
                "expertTensor to 1",
                tensor=s.EXPERT_TENSOR,
            ),
            _dual(
                "generation.inferenceOptimized",
                ~s.MOE | s.MAMBA,
                "true does not go with model.shape.experts {experts}: Megatron has it for experts without a gated "
                "activation only "
                "(Nemotron-H); set it to false",
                experts=s.EXPERTS,
            ),
        ),
        deviation="Megatron asks for no consent, and checks the rest while it builds layers of Transformer Engine, which the "
        "oracle cannot do without a GPU.",
    ),
    Rule(
        "sequence-length",
        "SequenceLengthInvalid",
        "error",
        "Prompt and answer share the sequence, so the longest answer leaves room for a prompt.",
        (
            clause(
                "generation.maxNewTokens",
                field("generation.maxNewTokens") < field("generation.maxSequenceLength"),
                "{new} leaves no room for a prompt in maxSequenceLength {length}; at most {would_do} would do",
                new=field("generation.maxNewTokens"),
                length=field("generation.maxSequenceLength"),
                would_do=field("generation.maxSequenceLength") - 1,
            ),
        ),
    ),
    Rule(
        "engine-slots",
        "EngineSlotsInvalid",
        "error",
        "Megatron's engine shares its slots out over the tensor-parallel ranks.",
        (
            clause(
                "generation.maxRequests",
                s.TENSOR.divides(field("generation.maxRequests")),
                "{slots} is not divisible by parallelism.tensor {tensor}; {would_do} would do",
                slots=field("generation.maxRequests"),
                tensor=s.TENSOR,
                would_do=field("generation.maxRequests").next_multiple(s.TENSOR),
            ),
        ),
    ),
    Rule(
        "server",
        "ServerInvalid",
        "error",
        "An agent speaks HTTP, so it needs the server; each data-parallel replica has a port of its own on the head, beside "
        "those that Ray and the driver use.",
        (
            clause(
                "generation.server.enabled",
                ~has("environment.agent") | field("generation.server.enabled"),
                "false does not go with environment.agent: agents speak HTTP with the model; set it to true",
            ),
            clause(
                "generation.server.port",
                field("generation.server.port").eq(0) | (field("generation.server.port") + s.DATA <= 65536),
                "{port} leaves no ports for {replicas} replicas; at most {would_do} would do, or 0",
                port=field("generation.server.port"),
                replicas=s.DATA,
                would_do=lift(65536) - s.DATA,
            ),
            *(_not_taken(port, by) for port, by in _TAKEN_PORTS),
        ),
        deviation="Not Megatron's subject.",
    ),
    Rule(
        "in-flight-calls",
        "InFlightCapZero",
        "error",
        "Each answer of a group is one call of an actor, which runs a limited number at once: at least one group must fit.",
        (
            clause(
                "algorithm.grpo.generationsPerPrompt",
                _BY_CALLS >= 1,
                "{answers} answers to a prompt are as many calls, and an actor takes {calls} at once: no prompt could "
                "be in flight; at "
                "most {calls} would do",
                answers=s.ANSWERS,
                calls=_CALLS,
            ),
        ),
        deviation="A limit of Ray's actors, not of Megatron.",
    ),
    Rule(
        "in-flight-cap",
        "InFlightCapLow",
        "warning",
        "Fewer prompts in flight than a step needs: each step waits for several rounds of answers.",
        (
            clause(
                "generation.maxInFlightPrompts",
                when(s.IN_FLIGHT < _BY_CALLS, s.IN_FLIGHT, _BY_CALLS) >= s.PROMPTS,
                "{cap} in flight (configured {configured}; actor calls allow {by_calls}) is less than "
                "algorithm.grpo.promptsPerStep "
                "{prompts}; each step waits for several rounds of answers",
                cap=when(s.IN_FLIGHT < _BY_CALLS, s.IN_FLIGHT, _BY_CALLS),
                configured=s.IN_FLIGHT,
                by_calls=_BY_CALLS,
                prompts=s.PROMPTS,
            ),
        ),
    ),
    Rule(
        "deadlines",
        "DeadlinesInvalid",
        "error",
        "A deadline must not be over before something that it waits for may be.",
        (
            _within_stall("deadlines.saveSeconds", "a save"),
            _within_stall("deadlines.handoverSeconds", "a hand-over"),
            _within_active("deadlines.provisioningSeconds", "provisioning"),
            _within_active("deadlines.saveSeconds", "a save"),
            clause(
                "failurePolicy.maxBackoffSeconds",
                field("failurePolicy.backoffSeconds") <= field("failurePolicy.maxBackoffSeconds"),
                "{longest} is less than backoffSeconds {first}; at least {first} would do",
                longest=field("failurePolicy.maxBackoffSeconds"),
                first=field("failurePolicy.backoffSeconds"),
            ),
        ),
        deviation="Not Megatron's subject.",
    ),
    Rule(
        "answer-timeout",
        "AnswerTimeoutLong",
        "warning",
        "An answer may take longer than the time after which a step counts as stalled.",
        (
            clause(
                "generation.answerTimeoutSeconds",
                field("generation.answerTimeoutSeconds") < _STALL,
                "{timeout} is not less than deadlines.stallSeconds {stall}: one slow answer looks like a stall",
                timeout=field("generation.answerTimeoutSeconds"),
                stall=_STALL,
            ),
        ),
    ),
    Rule(
        "checkpoint-period",
        "CheckpointPeriodLong",
        "warning",
        "A run that ends before its first periodic checkpoint starts from the beginning after any failure.",
        (_period("checkpoint.everySteps", "a failed run starts from the beginning"),),
    ),
    Rule(
        "validation-period",
        "ValidationPeriodLong",
        "warning",
        "A run that ends before its first validation is not validated on the way.",
        (_period("validation.everySteps", "the run ends before the first validation", "validation"),),
    ),
    Rule(
        "volume-path",
        "VolumePathInvalid",
        "error",
        "A path on a volume stays on it.",
        (
            clause(
                "checkpoint.volume.subPath",
                ~field("checkpoint.volume.subPath").matches("(^|/)[.][.](/|$)"),
                "{path} leads out of the volume; a path without .. would do",
                path=field("checkpoint.volume.subPath"),
            ),
            clause(
                "checkpoint.from.path",
                ~has("checkpoint.from") | ~field("checkpoint.from.path").matches("^/|//|(^|/)[.][.]?(/|$)"),
                "{path} names no checkpoint or run on the volume; a relative path without ., .. and // would do",
                path=field("checkpoint.from.path"),
            ),
        ),
        deviation="Not Megatron's subject.",
    ),
)
