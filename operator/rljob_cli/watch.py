"""`rljob watch`: a live view of one job on a cluster, until it ends."""

from __future__ import annotations

import argparse
import os
import posixpath
import shlex
import sys
import time
from collections.abc import Iterator
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rljob_api import names
from rljob_api.reasons import STALLED, STATE_PROVISIONING, STATE_RUNNING, ConditionType

from .errors import UserError

_ROUND_SECONDS = 30
_PAUSE_SECONDS = 2.0
_PATIENCE_SECONDS = 60.0
"""How long a cluster that has answered before may be silent: its API server is being upgraded, say."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "watch",
        help="follow a job on a cluster until it ends",
        description="Show step, reward, skipped prompts and state of a job, and what it waits for, until it ends. "
        "Ctrl-C stops watching, not the job.",
        epilog="exit status: 0 succeeded, 1 failed, 2 no such job, no cluster, or the time is over",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="name of the RLJob")
    parser.add_argument("-n", "--namespace", help="its namespace (default: the kubeconfig context's)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this time (default: never)")
    parser.set_defaults(run=run)


def condition(job: dict[str, Any], kind: ConditionType) -> dict[str, Any]:
    """One condition of a job; an empty one when it is not there."""
    conditions = job.get("status", {}).get("conditions", [])
    return next((entry for entry in conditions if entry["type"] == kind), {})


def ended(job: dict[str, Any]) -> bool | None:
    """True when succeeded, False when failed, None while undecided."""
    return {"True": True, "False": False}.get(condition(job, ConditionType.SUCCEEDED).get("status", ""))


def events(namespace: str | None, name: str, timeout: float | None) -> Iterator[dict[str, Any]]:
    """The job now and after each change. Raises UserError for no cluster, no CRD, no such job, deletion, or time over."""
    # The client takes 0.5 s to import, which the other commands need not wait for.
    import urllib3
    from kubernetes import config
    from kubernetes.client.exceptions import ApiException
    from kubernetes.config.config_exception import ConfigException

    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        # Named, since the client has read the variable when it was imported.
        path = os.environ.get("KUBECONFIG") or None
        config.load_kube_config(path)
        if namespace is None:
            namespace = config.list_kube_config_contexts(path)[1]["context"].get("namespace", "default")
    except (ConfigException, yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError, OSError) as error:
        # The client lets whatever a malformed kubeconfig runs into come through.
        detail = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"no cluster configured: {detail}; set KUBECONFIG (`make cluster-up` starts a cluster here)") from None
    version, silent_since = "", None
    while deadline is None or time.monotonic() < deadline:
        try:
            for job in _round(namespace, name, deadline, known=bool(version)):
                silent_since = None
                if job["metadata"]["resourceVersion"] != version:
                    version = job["metadata"]["resourceVersion"]
                    yield job
        except (ApiException, urllib3.exceptions.HTTPError) as error:
            silent_since = silent_since or time.monotonic()
            if not version or not _passes(error) or time.monotonic() - silent_since > _PATIENCE_SECONDS:
                raise UserError(_explain(error, name)) from None
            time.sleep(_PAUSE_SECONDS)
    raise UserError(f"RLJob {name} has not ended after {timeout:g} s")


def _round(namespace: str, name: str, deadline: float | None, *, known: bool) -> Iterator[dict[str, Any]]:
    """The job as it is, then its changes for a while. A listing begins each round: a watch alone can be too old (410)."""
    from kubernetes import client, watch

    api = client.CustomObjectsApi()
    where = (names.GROUP, names.VERSION, namespace, names.PLURAL)
    listing: Any = api.list_namespaced_custom_object(*where, field_selector=f"metadata.name={name}", _request_timeout=10)
    if not listing["items"]:
        found = "was deleted" if known else f"is not in namespace {namespace}; `kubectl get rlj -A` lists all"
        raise UserError(f"RLJob {name} {found}")
    yield listing["items"][0]
    stream = watch.Watch().stream(
        api.list_namespaced_custom_object,
        *where,
        field_selector=f"metadata.name={name}",
        resource_version=listing["metadata"]["resourceVersion"],
        timeout_seconds=_ROUND_SECONDS if deadline is None else max(1, min(_ROUND_SECONDS, int(deadline - time.monotonic()))),
        _request_timeout=(10, _ROUND_SECONDS + 15),
    )
    for event in stream:
        if event["type"] == "DELETED":
            raise UserError(f"RLJob {name} was deleted")
        yield event["object"]


def _passes(error: Any) -> bool:
    """Whether the cluster may answer again by itself: no connection, a watch that is too old, or it is busy or starting."""
    status = getattr(error, "status", None)
    return status is None or status in (410, 429) or status >= 500


def _explain(error: Any, name: str) -> str:
    match getattr(error, "status", None):
        case None:
            return f"the cluster does not answer: {error}; is it up? (`make cluster-status`)"
        case 404:
            return "the cluster does not know RLJob; install it with `helm install rljob charts/rljob`"
        case 401 | 403:
            return f"not allowed to read RLJob {name}: {error.reason}"
        case _:
            return f"the cluster answered {error.status} {error.reason}"


def describe(job: dict[str, Any]) -> str:
    """The line beside the bar."""
    status = job.get("status", {})
    parts = [f"reward {status.get('reward', '-')}", f"skipped {status.get('prompts', {}).get('skipped', 0)}"]
    if validation := status.get("validation"):
        parts.append(f"validation {validation['reward']}")
    if status.get("restarts"):
        parts.append(f"restarts {status['restarts']}")
    return "  ".join(parts)


def state(job: dict[str, Any]) -> str:
    """The reason of Succeeded, with the driver's phase while it runs."""
    reason = str(condition(job, ConditionType.SUCCEEDED).get("reason", "Waiting"))
    if reason == STATE_RUNNING.name:
        return f"{reason} ({condition(job, ConditionType.PROGRESSING).get('message', '')})"
    return reason


_TOLD_ELSEWHERE = (STATE_RUNNING.name, STATE_PROVISIONING.name)
"""States of Succeeded whose message is that of another line: of the numbers, and of ClusterReady."""


class Story:
    """What the conditions say of why a job moves or does not, each thing once: lines beside those of the numbers."""

    def __init__(self) -> None:
        self._told: dict[ConditionType, str] = {}
        self._log = ""

    def news(self, job: dict[str, Any]) -> list[str]:
        """What is new since the last call: `Condition=Status Reason: message`, and where the driver's log is read."""
        lines = []
        for kind in (ConditionType.VALIDATED, ConditionType.CLUSTER_READY, ConditionType.PROGRESSING, ConditionType.SUCCEEDED):
            found = condition(job, kind)
            text = f"{kind}={found['status']} {found['reason']}: {found['message']}" if _tells(kind, found) else ""
            if text and text != self._told.get(kind):
                lines.append(text)
            self._told[kind] = text
        log = log_command(job)
        if log and log != self._log:
            lines.append(f"log: {log}")
            self._log = log
        return lines


def _tells(kind: ConditionType, found: dict[str, Any]) -> bool:
    """Whether a condition is worth a line: the end is told last, and the numbers are in the line of the numbers."""
    match kind:
        case ConditionType.VALIDATED:
            return found.get("status") == "False"
        case ConditionType.PROGRESSING:
            return found.get("reason") == STALLED.name
        case ConditionType.SUCCEEDED:
            return found.get("status") == "Unknown" and found.get("reason") not in _TOLD_ELSEWHERE
    return bool(found)


def log_command(job: dict[str, Any]) -> str:
    """The command that follows the driver's log; empty while no driver runs."""
    status = job.get("status", {})
    if condition(job, ConditionType.DRIVER_RUNNING).get("status") != "True" or not status.get("rayClusterName"):
        return ""
    volume = status.get("checkpointVolume") or job["spec"]["checkpoint"]["volume"]
    directory = names.run_directory(job["metadata"]["namespace"], job["metadata"]["name"])
    path = posixpath.join(names.VOLUME_MOUNT_PATH, volume.get("subPath", ""), directory, names.driver_log(status["attempt"]))
    head = names.head_service(status["rayClusterName"])
    return f"kubectl -n {job['metadata']['namespace']} exec service/{head} -- tail -n 50 -f {shlex.quote(path)}"


def run(options: argparse.Namespace) -> int:
    """Follow the job on a terminal as a bar, elsewhere as lines."""
    console = Console()
    last: dict[str, Any] = {}
    line = ""
    story = Story()
    with Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[info]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("Waiting", total=None, info="")
        for last in events(options.namespace, options.name, options.timeout):
            status = last.get("status", {})
            for told in story.news(last):
                console.print(told, markup=False, highlight=False, soft_wrap=True)
            progress.update(
                task,
                description=state(last),
                completed=status.get("step", 0),
                total=status.get("totalSteps") or None,
                info=describe(last),
            )
            text = f"{state(last)}  step {status.get('step', 0)}/{status.get('totalSteps', '?')}  {describe(last)}"
            if not console.is_terminal and text != line:
                print(text, flush=True)
                line = text
            if ended(last) is not None:
                break
    summary = condition(last, ConditionType.SUCCEEDED)
    print(f"{options.name}: {summary['reason']}: {summary['message']}", file=sys.stdout if ended(last) else sys.stderr)
    return 0 if ended(last) else 1
