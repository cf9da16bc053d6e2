"""Entry point of the operator: `python -m rljob_operator`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from dataclasses import replace

from .access import Access, KeyFileError, read_key
from .api import ApiError, ApiUnreachableError
from .kube import ConfigurationError, Kube, connect, in_pod
from .logs import configure
from .service import Service, StartError
from .settings import DIRECT, Settings, SettingsError, describe, from_environment
from .shell import WatchError

log = logging.getLogger("rljob.operator")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

_AGAIN = "RLJOB_STARTED_AGAIN"
"""Set by the operator for the process image that takes its place: it has worked here before."""
_WATCH_RETRY_SECONDS = 3.0

_HELP = """Runs RLJobs: validates them, makes one RayCluster per attempt, submits the driver, keeps the status.

It reaches the API server by KUBECONFIG or ~/.kube/config, in a pod by its service account. Environment variables:
"""


def main(arguments: list[str] | None = None) -> int:
    """Run until stopped. Every foreseeable problem is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m rljob_operator",
        description=_HELP + describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--namespace", action="append", default=[], metavar="NAME", help="serve this namespace only (repeatable)"
    )
    parser.add_argument("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), help="default INFO")
    parsed = parser.parse_args(arguments)
    try:
        settings = from_environment(os.environ)
    except SettingsError as error:
        print(f"rljob-operator: {error}", file=sys.stderr)
        return EXIT_USAGE
    settings = replace(
        settings,
        namespaces=tuple(parsed.namespace) or settings.namespaces,
        log_level=parsed.log_level or settings.log_level,
    )
    configure(settings.log_level, settings.log_format)
    code, again = asyncio.run(_run(settings))
    if again:
        # A new process image: no state has to be carried over, all of it is in the cluster.
        os.environ[_AGAIN] = "true"
        os.execv(sys.executable, [sys.executable, "-m", "rljob_operator", *(arguments or sys.argv[1:])])  # noqa: S606
    return code


async def _run(settings: Settings) -> tuple[int, bool]:
    try:
        access = Access(read_key(settings.key_file), "" if settings.ray_access != DIRECT else settings.operator_namespace)
    except KeyFileError as error:
        print(f"rljob-operator: {error}", file=sys.stderr)
        return EXIT_USAGE, False
    try:
        kube = await connect()
    except ConfigurationError as error:
        print(f"rljob-operator: {error}", file=sys.stderr)
        return EXIT_FAILED, False
    try:
        return await _serve(kube, settings, access)
    except WatchError as error:
        # Exiting would leave it to the kubelet to start again, ever later: an outage of the API server must not outlast itself.
        log.warning("%s; starting again", error)
        await asyncio.sleep(_WATCH_RETRY_SECONDS)
        return EXIT_FAILED, True
    except (StartError, ApiUnreachableError, ApiError) as error:
        print(f"rljob-operator: {error}", file=sys.stderr)
        return EXIT_FAILED, False
    finally:
        await kube.close()


async def _serve(kube: Kube, settings: Settings, access: Access) -> tuple[int, bool]:
    service = Service(kube, settings, access)
    runner = await service.serve_health() if settings.health_port else None
    try:
        await _until_told(service.wait_for_cluster(patient=_AGAIN in os.environ or in_pod()))
        return await _run_service(service, kube, settings)
    except asyncio.CancelledError:
        return EXIT_OK, False  # told to stop while it waited
    finally:
        if runner is not None:
            await runner.cleanup()


async def _until_told(waiting: Coroutine[None, None, None]) -> None:
    """Run it until its end or SIGTERM (the first process of a container would not notice it by itself)."""
    task, loop = asyncio.ensure_future(waiting), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _run_service(service: Service, kube: Kube, settings: Settings) -> tuple[int, bool]:
    where = ", ".join(settings.namespaces) or "all namespaces"
    log.info("serving RLJobs in %s on %s (Ray: %s)", where, kube.server, settings.ray_access)
    await service.run()
    return EXIT_OK, service.kuberay_appeared


if __name__ == "__main__":
    sys.exit(main())
