"""Entry point of the operator: `python -m rljob_operator`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from dataclasses import replace

from .access import Access, KeyFileError, read_key
from .api import ApiError, ApiUnreachableError
from .kube import ConfigurationError, Kube, connect
from .service import Service, StartError, check
from .settings import DIRECT, Settings, SettingsError, describe, from_environment
from .shell import WatchError

log = logging.getLogger("rljob.operator")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

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
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z"
    )
    code, again = asyncio.run(_run(settings))
    if again:
        # A new process image: no state has to be carried over, all of it is in the cluster.
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
    except (StartError, WatchError, ApiUnreachableError, ApiError) as error:
        print(f"rljob-operator: {error}", file=sys.stderr)
        return EXIT_FAILED, False
    finally:
        await kube.close()


async def _serve(kube: Kube, settings: Settings, access: Access) -> tuple[int, bool]:
    with_kuberay = await check(kube, settings)
    if not with_kuberay:
        log.warning("KubeRay is not installed on %s; jobs wait until it is", kube.server)
    where = ", ".join(settings.namespaces) or "all namespaces"
    log.info("serving RLJobs in %s on %s (Ray: %s)", where, kube.server, settings.ray_access)
    service = Service(kube, settings, access, with_kuberay)
    await service.run()
    return EXIT_OK, service.kuberay_appeared


if __name__ == "__main__":
    sys.exit(main())
