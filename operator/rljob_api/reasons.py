"""Condition types and their reasons, with the words for people. Reasons are stable: scripts match on them.

`docs/conditions.md` is generated from this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ConditionType(StrEnum):
    """What the operator observes; the value is the condition's `type`."""

    VALIDATED = "Validated"
    CLUSTER_READY = "ClusterReady"
    DRIVER_RUNNING = "DriverRunning"
    PROGRESSING = "Progressing"
    PROMPTS_SKIPPED = "PromptsSkipped"
    RESTARTING = "Restarting"
    SUCCEEDED = "Succeeded"


@dataclass(frozen=True)
class Reason:
    """A stable word, the statuses it goes with, its template and what it means."""

    name: str
    condition: ConditionType
    status: str
    template: str
    meaning: str

    def message(self, **values: object) -> str:
        """The template filled; a missing value is a programming error (KeyError)."""
        return self.template.format(**values)


REASONS: dict[tuple[ConditionType, str], Reason] = {}


def _reason(condition: ConditionType, status: str, name: str, template: str, meaning: str) -> Reason:
    reason = Reason(name, condition, status, template, meaning)
    if (condition, name) in REASONS:
        raise ValueError(f"reason {name} of {condition} is declared twice")
    REASONS[condition, name] = reason
    return reason


_V = ConditionType.VALIDATED
VALID = _reason(_V, "True", "Valid", "the spec passes all rules{warnings}", "All rules pass; warnings are in the message.")
INVALID = {
    name: _reason(_V, "False", name, "{findings}", meaning)
    for name, meaning in (
        ("SpecUnreadable", "The spec does not fit the schema of this operator's version."),
        ("NameInvalid", "The name is too long or not DNS-1035."),
        ("ChoiceInvalid", "Not exactly one of alternative fields is given."),
        ("WorldSizeMismatch", "The number of ranks is not divisible by the product of the parallel sizes."),
        ("GenerationLayoutMismatch", "Generation's parallel sizes differ from training's."),
        ("BatchSizeMismatch", "Answers per step are not divisible by microBatchSize x data-parallel size."),
        (
            "SequenceParallelInvalid",
            "Sequence parallelism without tensor parallelism, or experts under tensor parallelism without it.",
        ),
        ("PipelineInvalid", "Layers can't be shared out over the pipeline stages, or generation can't use such stages."),
        ("ContextParallelInvalid", "Context parallelism with a backend or layers that lack it."),
        ("ModelShapeInvalid", "The model's sizes do not fit together or do not fit the layout."),
        ("ExpertsInvalid", "Experts can't be shared out, or there are none."),
        ("HybridPatternInvalid", "A hybrid model's pattern contradicts its sizes or can't be cut into stages."),
        ("MambaInvalid", "Mamba layers without a GPU, or heads and groups that can't be shared out."),
        ("BackendInvalid", "Transformer Engine without a GPU."),
        ("InferenceOptimizedInvalid", "The dual-mode model lacks something that it needs."),
        ("SequenceLengthInvalid", "Answers leave no room for prompts."),
        ("EngineSlotsInvalid", "The engine's slots can't be shared out over tensor-parallel ranks."),
        ("InFlightCapZero", "No prompt could be in flight."),
        ("DeadlinesInvalid", "A deadline is over before something that it waits for may be."),
        ("VolumePathInvalid", "A path leads out of its volume."),
        ("AccessModeInvalid", "The checkpoint claim can't be mounted by all pods."),
        ("VolumeChanged", "The checkpoint volume was edited after an attempt began to write to it."),
        ("NotSupportedYet", "A field is set to a value that the installed version does not honour."),
    )
}

_C = ConditionType.CLUSTER_READY
CLUSTER_NOT_CREATED = _reason(_C, "False", "NotCreated", "no RayCluster exists", "Nothing was created yet.")
VOLUME_MISSING = _reason(
    _C,
    "False",
    "VolumeMissing",
    "PersistentVolumeClaim {claim} does not exist in namespace {namespace}; create it, the job goes on by itself",
    "The claim of checkpoint.volume does not exist; nothing is created until it does.",
)
KUBERAY_MISSING = _reason(
    _C,
    "False",
    "KubeRayMissing",
    "the API ray.io/v1 RayCluster does not exist in this cluster; install KubeRay >= 1.6, the job goes on by itself",
    "KubeRay's CRDs are not installed.",
)
NAME_TAKEN = _reason(
    _C,
    "False",
    "NameTaken",
    "{what} still exists and is not of this job; the job goes on by itself when it is gone",
    "A RayCluster or pods of an earlier job of the same name, or of someone else; two runs never share a directory.",
)
PODS_PENDING = _reason(
    _C,
    "False",
    "PodsPending",
    "{ready} of {wanted} pods are ready{detail}",
    "Pods are starting; quotes the newest problem.",
)
PODS_READY = _reason(_C, "True", "AllPodsReady", "all {wanted} pods are ready", "Head and workers are ready now.")
CLUSTER_REJECTED = _reason(
    _C, "False", "ClusterRejected", "RayCluster {cluster} is refused: {detail}", "KubeRay or the API server refuses it."
)
HEAD_LOST = _reason(_C, "False", "HeadLost", "{detail}", "The head ended; the attempt is over.")
WORKER_LOST = _reason(_C, "False", "WorkerLost", "{detail}", "A worker ended; the attempt is over.")
CLUSTER_KEPT = _reason(
    _C, "True", "KeptAfterFinish", "kept until {until} (ttlSecondsAfterFinished)", "The job ended; its cluster is kept."
)
CLUSTER_DELETED = _reason(_C, "False", "Deleted", "RayCluster {cluster} is deleted", "The attempt's cluster is gone.")

_D = ConditionType.DRIVER_RUNNING
DRIVER_NOT_SUBMITTED = _reason(_D, "False", "NotSubmitted", "waiting for the cluster", "The driver was not submitted yet.")
DRIVER_SUBMITTED = _reason(_D, "Unknown", "Submitted", "submitted as {submission}; not running yet", "Ray has the driver.")
DRIVER_RUNNING = _reason(_D, "True", "Running", "{submission} is running", "Ray says that the driver runs.")
DRIVER_UNREACHABLE = _reason(
    _D,
    "Unknown",
    "Unreachable",
    "Ray's dashboard does not answer: {detail}",
    "Not a failure by itself; the stall deadline bounds it.",
)
DRIVER_EXITED = _reason(_D, "False", "Exited", "{submission} ended with exit code {code}", "The driver ended.")

_P = ConditionType.PROGRESSING
NOT_STARTED = _reason(_P, "False", "NotStarted", "the driver is not running", "Nothing can progress yet.")
WAITING_FOR_FIRST_STEP = _reason(
    _P,
    "Unknown",
    "WaitingForFirstStep",
    "phase {phase}; the first step of this attempt is not done",
    "Starting or loading.",
)
STEP_ADVANCED = _reason(_P, "True", "StepAdvanced", "phase {phase}", "Steps advance within deadlines.stallSeconds.")
STALLED = _reason(
    _P,
    "False",
    "Stalled",
    "{detail}",
    "No step within deadlines.stallSeconds.",
)
PROGRESS_ENDED = _reason(_P, "False", "Finished", "the job has ended", "Nothing more will happen.")

_S = ConditionType.PROMPTS_SKIPPED
SKIPPED_NOT_REPORTED = _reason(_S, "Unknown", "NotReported", "no report of the driver yet", "The driver has not reported.")
SKIPPED_NONE = _reason(_S, "False", "None", "0 of {handed_out} prompts skipped", "No prompt was skipped.")
SKIPPED_WITHIN = _reason(
    _S, "True", "WithinBudget", "{skipped} of {handed_out} prompts skipped ({causes})", "At most prompts.maxSkipped."
)
SKIPPED_EXCEEDED = _reason(
    _S,
    "True",
    "BudgetExceeded",
    "{skipped} of {handed_out} prompts skipped, {budget} allowed ({causes})",
    "More than prompts.maxSkipped.",
)

_R = ConditionType.RESTARTING
NOT_RESTARTING = _reason(_R, "False", "NotRestarting", "", "No restart is under way.")
WAITING_FOR_PODS = _reason(
    _R,
    "True",
    "WaitingForPodsToExit",
    "waiting for pods of attempt {attempt} to end: {pods}",
    "Attempts never overlap.",
)
BACKING_OFF = _reason(_R, "True", "BackingOff", "attempt {attempt} starts at {time}", "Waiting between attempts.")

_T = ConditionType.SUCCEEDED
STATE_INVALID = _reason(_T, "Unknown", "Invalid", "the spec is refused; see Validated", "Waiting for a corrected spec.")
STATE_PENDING = _reason(_T, "Unknown", "Pending", "{detail}", "Waiting for something outside: a volume, KubeRay.")
STATE_PROVISIONING = _reason(_T, "Unknown", "Provisioning", "waiting for pods", "The cluster is being made.")
STATE_STARTING = _reason(_T, "Unknown", "Starting", "the driver is starting", "Pods are ready, no step yet.")
STATE_RUNNING = _reason(_T, "Unknown", "Running", "step {step} of {total}", "Training.")
STATE_RESTARTING = _reason(_T, "Unknown", "Restarting", "{detail}", "Between two attempts.")
STATE_ERROR = _reason(
    _T,
    "Unknown",
    "OperatorError",
    "the operator could not handle this job and tries again ({detail}); its log has the traceback",
    "A defect of the operator; what runs goes on.",
)
COMPLETED = _reason(_T, "True", "Completed", "{detail}", "All steps are done.")
TARGET_REACHED = _reason(_T, "True", "TargetReached", "{detail}", "validation.stopAtReward was reached.")
FAILURES = {
    name: _reason(_T, "False", name, "attempt {attempt}: {detail}", meaning)
    for name, meaning in (
        ("DriverFailed", "The driver ended with an exit code that no restart can help, or restarts are used up."),
        ("HeadLost", "The head pod was lost and restarts are used up."),
        ("WorkerLost", "A worker pod was lost and restarts are used up."),
        ("ClusterRejected", "KubeRay or the API server refuses the RayCluster."),
        ("ProvisioningDeadlineExceeded", "Pods were not ready within deadlines.provisioningSeconds."),
        ("FirstStepDeadlineExceeded", "No step within deadlines.firstStepSeconds."),
        ("StallDeadlineExceeded", "No step within deadlines.stallSeconds."),
        ("DriverLost", "Ray no longer knows the driver."),
    )
}
