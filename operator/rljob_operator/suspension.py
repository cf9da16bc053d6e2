"""`spec.suspend`: a save first, then no pods, then rest. Resuming is a new attempt that does not count as a restart."""

from __future__ import annotations

from rljob_api import reasons
from rljob_api.spec import Deadlines

from .attempt import describe
from .draft import Draft
from .plan import Action, AskSave, DeleteCluster, DeletePod, DropSecret
from .report import take_saved
from .terms import WAIT_SECONDS, Step
from .times import format_time, parse_time
from .world import Driver, SaveAnswer, World

_SAVE_WAIT_SECONDS = 2.0
"""How long one request waits for the save; it is asked again until deadlines.saveSeconds is over."""


def end_attempt(world: World, draft: Draft, deadlines: Deadlines) -> Step:
    """An attempt is under way: have it save, then end it."""
    since = _since(world, draft)
    cluster, now = world.cluster, format_time(world.now)
    waited = (world.now - parse_time(since)).total_seconds()
    runs = isinstance(world.driver, Driver) and world.driver.status == "RUNNING"
    if cluster is not None and runs and not _done(world) and 0 <= waited < deadlines.save_seconds:
        describe(world, draft, cluster)
        accepted = isinstance(world.save, SaveAnswer)
        words = "the driver writes a checkpoint" if accepted else "asking the driver for a checkpoint"
        _say(draft, f"{words}; its pods end after {deadlines.save_seconds} s at the latest (saveSeconds)")
        return Step((AskSave(cluster.name, _SAVE_WAIT_SECONDS),), 0.5)
    draft.update(attempt_end_time=now)
    if isinstance(world.save, SaveAnswer):
        take_saved(world, draft, world.save.checkpoint)
    _say(draft, f"ending the pods of attempt {world.job.status.attempt}")
    for reason in (reasons.DRIVER_NOT_SUBMITTED, reasons.NOT_STARTED, reasons.NOT_RESTARTING):
        draft.set(reason)
    actions: list[Action] = []
    if cluster is not None:
        draft.set(reasons.CLUSTER_DELETED, cluster=cluster.name)
    if cluster is not None and not cluster.deleting:
        actions.append(DeleteCluster(cluster.name, cluster.uid))
    elif world.has_bare_secret:
        actions.append(DropSecret(world.job.cluster_name))
    if (pod := world.preflight) is not None and not pod.deleting:
        actions.append(DeletePod(pod.name, pod.uid))
    return Step(tuple(actions), 0.5)


def _done(world: World) -> bool:
    """Whether the driver has saved what it had when it was asked, or has said that it will not."""
    save = world.save
    if not isinstance(save, SaveAnswer):
        return False
    newest = world.report.checkpoint if world.report else None
    return save.saved or not save.accepted or (newest is not None and save.step is not None and newest.step >= save.step)


def rest(world: World, draft: Draft, left: str, actions: tuple[Action, ...]) -> Step:
    """Between attempts: nothing is started."""
    _since(world, draft)
    draft.set(reasons.NOT_RESTARTING)
    if left:
        _say(draft, f"waiting for pods of attempt {world.job.status.attempt} to end: {left}")
        return Step(actions, WAIT_SECONDS)
    checkpoint = world.job.status.checkpoint
    # The driver trains on from the save that it was asked for, and saves once more when its pod ends.
    known = f"goes on from step {checkpoint.step} or later, as the volume has it" if checkpoint else "looks at the volume first"
    detail = f"the next attempt {known}"
    if draft.reason_of(reasons.SUSPENDED.condition) != reasons.SUSPENDED.name:
        draft.event(reasons.IS_SUSPENDED, detail)
    draft.set(reasons.SUSPENDED, detail=detail)
    draft.set(reasons.STATE_SUSPENDED, detail=detail)
    draft.set(reasons.CLUSTER_NOT_CREATED)
    return Step(actions)


def lift(world: World, draft: Draft) -> None:
    """The job is not suspended (any more): what the suspension lasted is not counted by deadlines.activeSeconds."""
    status = world.job.status
    draft.set(reasons.NOT_SUSPENDED)
    if status.suspend_time is None:
        return
    lasted = max((world.now - parse_time(status.suspend_time)).total_seconds(), 0.0) if status.start_time else 0.0
    draft.update(suspend_time=None, suspended_seconds=status.suspended_seconds + round(lasted))
    draft.event(reasons.RESUMED, f"spec.suspend is false again, after {lasted:.0f} s")


def _since(world: World, draft: Draft) -> str:
    """When the suspension began; a moment in the future began before the clock was set back."""
    known = world.job.status.suspend_time
    since = known if known and parse_time(known) <= world.now else format_time(world.now)
    draft.update(suspend_time=since)
    return since


def _say(draft: Draft, detail: str) -> None:
    if draft.reason_of(reasons.SUSPENDING.condition) not in (reasons.SUSPENDING.name, reasons.SUSPENDED.name):
        draft.event(reasons.SUSPENSION_BEGINS, detail)
    draft.set(reasons.SUSPENDING, detail=detail)
    draft.set(reasons.STATE_SUSPENDED, detail=detail)
