"""The progress bar of `rljob local` on a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from rljob_api.progress import ProgressReport
from rljob_workload.runtime.progress import Progress

#: Seconds between two refreshes.
REFRESH_SECONDS = 0.2


def wanted(show_progress: bool) -> bool:
    """Whether standard error is a terminal that a bar makes sense on."""
    return show_progress and sys.stderr.isatty()


@contextmanager
def bar(progress: Progress) -> Iterator[None]:
    """Show the report as a bar until the block ends."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("reward {task.fields[reward]}"),
        TextColumn("validation {task.fields[validation]}"),
        TextColumn("skipped {task.fields[skipped]}"),
        TextColumn("{task.fields[phase]}"),
        TimeElapsedColumn(),
    )
    ended = threading.Event()
    with Bar(*columns, console=Console(stderr=True), refresh_per_second=1 / REFRESH_SECONDS) as shown:
        report = progress.report
        task = shown.add_task(report.name, total=report.total_steps, **fields(report))

        def follow() -> None:
            while not ended.wait(REFRESH_SECONDS):
                shown.update(task, completed=progress.report.step, **fields(progress.report))

        thread = threading.Thread(target=follow, name="view", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            shown.update(task, completed=progress.report.step, **fields(progress.report))


def fields(report: ProgressReport) -> dict[str, Any]:
    """What stands beside the bar."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    return {
        "reward": number(report.reward),
        "validation": number(report.validation_reward),
        "skipped": str(report.prompts.skipped),
        "phase": report.phase,
    }
