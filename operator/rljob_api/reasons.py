"""Condition types and their reasons, with the words for people, and the events. Reasons are stable: scripts match on them.

`docs/conditions.md` is generated from this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class ConditionType(StrEnum):
    """What the operator observes; the value is the condition's `type`."""

    VALIDATED = "Validated"
    CLUSTER_READY = "ClusterReady"
    DRIVER_RUNNING = "DriverRunning"
    PROGRESSING = "Progressing"
    CHECKPOINT_AVAILABLE = "CheckpointAvailable"
    PROMPTS_SKIPPED = "PromptsSkipped"
    SUSPENDED = "Suspended"
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
        ("ServerInvalid", "An agent without the HTTP server, or ports that are taken or leave none for a replica."),
        ("DeadlinesInvalid", "A deadline is over before something that it waits for may be."),
        ("AgentCommandInvalid", "The agent's command names no program, or has a null byte."),
        ("NumberInvalid", "A number cannot be computed with, or has no meaning where it stands."),
        ("VolumePathInvalid", "A path leads out of its volume, or names nothing on it."),
        ("FailureRulesInvalid", "A rule of failurePolicy.rules could match nothing, or everything."),
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
VOLUME_UNBOUND = _reason(
    _C,
    "False",
    "VolumeUnbound",
    "PersistentVolumeClaim {claim} has no volume yet: {detail}; the job goes on by itself",
    "The claim of checkpoint.volume is not bound; nothing is created until it is.",
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
    _C,
    "False",
    "ClusterRejected",
    "{what} is refused: {detail}",
    "KubeRay or the API server refuses it, or the preflight's pod.",
)
HEAD_LOST = _reason(_C, "False", "HeadLost", "{detail}", "The head ended; the attempt is over.")
WORKER_LOST = _reason(_C, "False", "WorkerLost", "{detail}", "A worker ended; the attempt is over.")
CLUSTER_KEPT = _reason(
    _C,
    "False",
    "KeptAfterFinish",
    "the job has ended; its head is kept until {until} (ttlSecondsAfterFinished)",
    "The job ended: workers go at once, the head stays a while, for its logs and dashboard.",
)
CLUSTER_DELETED = _reason(_C, "False", "Deleted", "RayCluster {cluster} is deleted", "The attempt's cluster is gone.")

_D = ConditionType.DRIVER_RUNNING
DRIVER_NOT_SUBMITTED = _reason(
    _D,
    "False",
    "NotSubmitted",
    "no driver is submitted; one is when all pods of an attempt are ready",
    "No attempt has a driver, or none any more.",
)
DRIVER_SUBMITTED = _reason(_D, "Unknown", "Submitted", "submitted as {submission}; not running yet", "Ray has the driver.")
DRIVER_RUNNING = _reason(_D, "True", "Running", "{submission} is running", "Ray says that the driver runs.")
DRIVER_UNREACHABLE = _reason(
    _D,
    "Unknown",
    "Unreachable",
    "{detail}",
    "Ray does not answer as it should, or has not taken the driver; not a failure by itself, the deadlines bound it.",
)
DRIVER_EXITED = _reason(_D, "False", "Exited", "{submission} ended{how}", "The driver ended, by itself or with its pods.")

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

_K = ConditionType.CHECKPOINT_AVAILABLE
NOT_CHECKED = _reason(_K, "Unknown", "NotChecked", "the volume was not looked at yet", "Nothing is known yet.")
CHECKING = _reason(
    _K, "Unknown", "Checking", "pod {pod} looks at the volume{detail}", "The preflight runs, before any other pod exists."
)
NONE_YET = _reason(_K, "False", "NoneYet", "the run has no checkpoint yet", "The attempt begins at step 0.")
AVAILABLE = _reason(_K, "True", "Available", "step {step}: {path}", "The newest complete checkpoint of the run's lineage.")
PASSED_OVER = _reason(
    _K,
    "True",
    "PassedOver",
    "step {step}: {path}; passed over: {passed}",
    "A newer checkpoint is damaged or could not be loaded; an older one is used.",
)
WITHOUT_LEDGER = _reason(
    _K,
    "True",
    "WithoutLedger",
    "step {step}: {path}; it was written without a prompt ledger: up to {at_risk} prompts may have been lost before it",
    "The run is lossless from its own first checkpoint on.",
)
CHECKPOINT_GONE = _reason(
    _K,
    "False",
    "Gone",
    "{path} of this run is not on the volume any more ({found}); bring it back, or delete the RLJob and create it anew to "
    "start from the beginning",
    "The run had a checkpoint, and the volume has none: starting over would forget the run. No GPU pod is made.",
)
BLOCKED_BY = {
    outcome: _reason(_K, "False", name, "{detail}", meaning + " No GPU pod is made.")
    for outcome, name, meaning in (
        ("OnExisting", "ExistingRefused", "Somebody's run is there, and checkpoint.onExisting is Refuse."),
        ("Foreign", "ForeignRun", "The directory belongs to a job of another name."),
        ("Incompatible", "Incompatible", "The checkpoint does not fit the spec; the message names what differs."),
        ("Corrupt", "Corrupt", "There are checkpoints, and none is valid."),
        ("Unusable", "VolumeUnusable", "The volume can't be read or written."),
    )
}

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

_U = ConditionType.SUSPENDED
NOT_SUSPENDED = _reason(_U, "False", "NotSuspended", "", "The job may run.")
SUSPENDING = _reason(
    _U, "False", "Suspending", "{detail}", "spec.suspend is true: a last checkpoint is being written, or pods are ending."
)
SUSPENDED = _reason(
    _U, "True", "SuspendedByUser", "spec.suspend is true; {detail}", "Nothing runs until spec.suspend is false."
)

_R = ConditionType.RESTARTING
NOT_RESTARTING = _reason(_R, "False", "NotRestarting", "", "No restart is under way.")
WAITING_FOR_PODS = _reason(
    _R,
    "True",
    "WaitingForPodsToExit",
    "waiting for pods of {attempt} to end: {pods}",
    "Attempts never overlap.",
)
BACKING_OFF = _reason(_R, "True", "BackingOff", "attempt {attempt} starts at {time}", "Waiting between attempts.")

_T = ConditionType.SUCCEEDED
STATE_INVALID = _reason(_T, "Unknown", "Invalid", "the spec is refused; see Validated", "Waiting for a corrected spec.")
STATE_PENDING = _reason(_T, "Unknown", "Pending", "{detail}", "Waiting for something outside: a volume, KubeRay.")
STATE_CHECKING = _reason(
    _T, "Unknown", "Checking", "looking at the checkpoint volume{detail}", "The preflight, before any other pod exists."
)
STATE_BLOCKED = _reason(
    _T,
    "Unknown",
    "Blocked",
    "{detail}; looked at again when the spec changes, and every {seconds} s",
    "What is on the checkpoint volume does not go with the spec; see CheckpointAvailable.",
)
STATE_SUSPENDED = _reason(_T, "Unknown", "Suspended", "{detail}", "spec.suspend is true.")
STATE_PROVISIONING = _reason(_T, "Unknown", "Provisioning", "waiting for pods{detail}", "The cluster is being made.")
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
# The reasons that an attempt can fail for: status.lastFailure.reason, and with no restart left Succeeded's. Rules of
# failurePolicy.rules name them in onReasons.
FAILURES = {
    name: _reason(_T, "False", name, "attempt {attempt}: {detail}", meaning)
    for name, meaning in (
        ("DriverFailed", "The driver ended with an exit code."),
        ("HeadLost", "The head pod was lost."),
        ("WorkerLost", "A worker pod was lost."),
        ("OutOfMemory", "A pod went over its memory limit (OOMKilled)."),
        ("Preempted", "The scheduler took a pod's place for another of higher priority."),
        ("Drained", "A pod was evicted: a drain, or a taint of its node."),
        ("Evicted", "A pod was ended by its node (shutting down, short of something), or its node is gone."),
        ("PreflightFailed", "The preflight's pod ended without a report."),
        ("ClusterRejected", "KubeRay or the API server refuses the RayCluster, or the preflight's pod, for good."),
        ("ProvisioningDeadlineExceeded", "Pods were not ready within deadlines.provisioningSeconds."),
        ("FirstStepDeadlineExceeded", "No step within deadlines.firstStepSeconds."),
        ("StallDeadlineExceeded", "No step within deadlines.stallSeconds."),
        ("ActiveDeadlineExceeded", "The run took longer than deadlines.activeSeconds."),
        ("DriverLost", "Ray no longer knows the driver."),
    )
}
GO_ON = "; to go on from its volume, delete this RLJob and create it again"
"""What there is to do about a job that has failed."""

FINAL_FAILURES = frozenset({"ActiveDeadlineExceeded", "ClusterRejected"})
"""What no restart can help and no rule can overrule."""


# ---- Events ----

EventType = Literal["Normal", "Warning"]


@dataclass(frozen=True)
class Event:
    """What happens once, where a condition tells what is; a condition whose turn is an event of itself lends it its reason."""

    name: str
    type: EventType
    meaning: str


EVENTS: dict[str, Event] = {}


def _event(type_: EventType, name: str, meaning: str) -> Event:
    if name in EVENTS:
        raise ValueError(f"event {name} is declared twice")
    EVENTS[name] = Event(name, type_, meaning)
    return EVENTS[name]


ATTEMPT_STARTED = _event("Normal", "AttemptStarted", "An attempt was counted; what it needs is made next.")
STARTS_FROM_SCRATCH = _event("Normal", "StartsFromScratch", "The preflight found nothing to go on from.")
RESUMES = _event("Normal", "Resumes", "The preflight chose the checkpoint that the attempt goes on from.")
CHECKPOINT_PASSED_OVER = _event("Warning", "CheckpointPassedOver", "It passed over newer ones; the message says why.")
CHECKPOINT_WITHOUT_LEDGER = _event(
    "Warning",
    "CheckpointWithoutLedger",
    "The checkpoint was written without a prompt ledger; the message says what is at risk.",
)
SUBMITTED = _event("Normal", "DriverSubmitted", "Ray has taken the driver.")
ATTEMPT_FAILED = _event(
    "Warning", "AttemptFailed", "An attempt failed, and another follows; the message begins with the reason."
)
ATTEMPT_RENEWED = _event(
    "Normal", "AttemptRenewed", "The spec was edited before the attempt's pods were ready: the next attempt takes the edit."
)
BUDGET_EXCEEDED = _event("Warning", "PromptsSkipped", "More prompts were skipped than prompts.maxSkipped.")
SUSPENSION_BEGINS = _event("Normal", "Suspending", "spec.suspend became true: a save is asked for, then the pods end.")
IS_SUSPENDED = _event("Normal", "Suspended", "Nothing runs any more.")
EDIT_IGNORED = _event(
    "Warning", "EditIgnored", "The spec of a job that has ended was edited; of an ended job only its time to be kept counts."
)
RESUMED = _event("Normal", "Resumed", "spec.suspend became false: the next attempt may start.")


EDITED_AFTER_END = (
    "the job has ended, and an edit of its spec changes nothing but ttlSecondsAfterFinished; to train on, delete the RLJob and "
    "create it again: it goes on from its volume (checkpoint.onExisting Resume)"
)
"""What EditIgnored says."""


def event_of(what: Event | Reason) -> tuple[EventType, str]:
    """Type and reason of an event. A condition's reason is a warning, but for the job's success."""
    if isinstance(what, Event):
        return what.type, what.name
    return ("Normal" if what.condition is ConditionType.SUCCEEDED and what.status == "True" else "Warning"), what.name
