"""Entry point of the driver on a cluster: `python -m rljob_workload.runtime.main`, everything else by environment."""

from __future__ import annotations

import logging
import os
import sys

from rljob_api.exitcodes import ExitCode, describe
from rljob_api.names import PROGRESS_PORT
from rljob_workload.runtime.control import Access
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.run import execute, log_to_stderr
from rljob_workload.runtime.settings import attempt_from_environment

#: The final report stays readable this long, or until somebody has read it.
LINGER_SECONDS = 15.0


def main() -> int:
    """Run the attempt that the environment describes."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        attempt = attempt_from_environment()
    except RunError as err:
        log_to_stderr()
        logging.getLogger("rljob.driver").error("exit code %s: %s", describe(int(err.code)), err)  # noqa: TRY400
        return int(err.code)
    return execute(
        attempt,
        start_ray=_connect,
        mirror=attempt.directory / "progress.json",
        host="0.0.0.0",  # noqa: S104 - the operator reads it from another pod
        port=PROGRESS_PORT,
        spread=True,
        show_log=True,
        show_bar=False,
        linger_seconds=LINGER_SECONDS,
        access=Access.of(os.environ),
    )


def _connect() -> dict[str, int]:
    """Join the cluster that this process was submitted to; never one that happens to be found. Its daemons are not ours."""
    import ray

    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise RunError(
            ExitCode.ENVIRONMENT_MISSING,
            "RAY_ADDRESS is not set: this driver is submitted as a Ray job, which sets it; `rljob local` starts its own Ray",
        )
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError) as err:
        raise RunError(ExitCode.ENVIRONMENT_MISSING, f"cannot join Ray at RAY_ADDRESS={address}: {err}") from err
    return {}


if __name__ == "__main__":
    sys.exit(main())
