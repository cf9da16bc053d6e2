"""What follows a failure: the default table, and the user's rules over it. Everything that can end an attempt is a row here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rljob_api.exitcodes import ExitCode
from rljob_api.pattern import Pattern, PatternError
from rljob_api.spec import Deadlines, FailurePolicy, FailureRule

from .world import is_restartable

Action = Literal["Restart", "RestartUncounted", "Fail"]


@dataclass(frozen=True)
class Failure:
    """Why an attempt is over. `reason` is a key of `rljob_api.reasons.FAILURES`."""

    reason: str
    detail: str
    exit_code: int | None = None
    evident: bool = True
    """Whether it is known how the thing that ended it ended."""
    final: bool = False
    """No restart can help, and no rule can say otherwise."""
    logs: str = ""
    """The driver's last log lines, with a heading; empty when there are none."""
    lost: Literal["", "head", "worker"] = ""
    """The pod that is gone, whatever the reason."""


@dataclass(frozen=True)
class Decision:
    """What to do, and who says so."""

    action: Action
    rule: str = ""
    """Name of the rule of failurePolicy.rules; empty where the default table decided."""


# The default table. `Restart` counts toward failurePolicy.maxRestarts. What Kubernetes does to make room for others is nobody's
# fault and is not counted. DriverFailed goes by the exit code, StallDeadlineExceeded by deadlines.onStall.
DEFAULTS: dict[str, Action] = {
    "HeadLost": "Restart",
    "WorkerLost": "Restart",
    "OutOfMemory": "Restart",
    "Preempted": "RestartUncounted",
    "Drained": "RestartUncounted",
    "Evicted": "RestartUncounted",
    "PreflightFailed": "Restart",
    "ClusterRejected": "Fail",
    "ProvisioningDeadlineExceeded": "Restart",
    "FirstStepDeadlineExceeded": "Restart",
    "ActiveDeadlineExceeded": "Fail",
    "DriverLost": "Restart",
}

# Reasons of a pod's DisruptionTarget condition: Kubernetes ends the pod for something that the pod did not do.
DISRUPTIONS: dict[str, str] = {
    "PreemptionByScheduler": "Preempted",
    "EvictionByEvictionAPI": "Drained",
    "DeletionByTaintManager": "Drained",
    "TerminationByKubelet": "Evicted",
    "DeletionByPodGC": "Evicted",
}


def classify(failure: Failure, policy: FailurePolicy, deadlines: Deadlines) -> Decision:
    """The first rule that matches, or the default table's row."""
    if failure.final:
        return Decision("Fail")
    for rule in policy.rules:
        if matches(rule, failure):
            return Decision(rule.action, rule.name)
    if failure.reason == "DriverFailed":
        return Decision(_by_exit_code(failure.exit_code))
    if failure.reason == "StallDeadlineExceeded":
        return Decision("Fail" if deadlines.on_stall == "Fail" else "Restart")
    return Decision(DEFAULTS[failure.reason])


def _by_exit_code(code: int | None) -> Action:
    if code == ExitCode.STOPPED:  # asked from outside, mostly by the end of its pod; it has saved and lost nothing
        return "RestartUncounted"
    return "Restart" if code == ExitCode.OK or is_restartable(code) else "Fail"  # OK, and yet the run was not done


def matches(rule: FailureRule, failure: Failure) -> bool:
    """Whether all criteria that the rule gives are met; a rule without any, or with an unreadable pattern, never matches."""
    if not (rule.on_exit_codes or rule.on_reasons or rule.on_message_pattern):
        return False
    if rule.on_exit_codes and failure.exit_code not in rule.on_exit_codes:
        return False
    if rule.on_reasons and failure.reason not in rule.on_reasons:
        return False
    if rule.on_message_pattern is None:
        return True
    try:
        return Pattern(rule.on_message_pattern).search(failure.detail + failure.logs)
    except PatternError:  # the spec was refused for it at its edit; the attempt's own rules must still be read
        return False
