"""`rljob simulate`: the prompt bookkeeping under a virtual clock, with crashes between any two operations."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .errors import UserError

#: Option, type, help; names and defaults are those of the workload's SimSettings.
_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("seed", int, "everything follows from it (default 0)"),
    ("prompts", int, "prompts to train; filtered and skipped ones come on top (default 2000)"),
    ("crashes", int, "crashes, each between two operations (default 5)"),
    ("failure-rate", float, "share of tries that fail (default 0.02)"),
    (
        "withdrawal-rate",
        float,
        "share of tries that are withdrawn by no fault of the prompt, each with half of all others under way (default 0.005)",
    ),
    ("rows", int, "rows of the data set (default: two fifths of the prompts, so that epochs end within the run)"),
    ("prompts-per-step", int, "P (default 32)"),
    ("group-size", int, "G (default 2)"),
    ("max-age", int, "maxTrajectoryAgeSteps (default 2)"),
    ("in-flight", int, "groups answered at once (default P times the age)"),
    ("retry-budget", int, "failed tries before a prompt is skipped (default 3)"),
    ("handout", int, "rows per handout of the replayable source (default 32)"),
    ("save-every", int, "steps between two checkpoints (default 10)"),
    ("filter-rate", float, "share of groups whose answers all get the same reward (default 0.05)"),
    ("bad-rows", float, "share of rows that always fail, that never return, that are too long (default: failure rate / 40)"),
    ("spread", float, "spread of the answer times: sigma of a log-normal (default 1)"),
    ("train-time", float, "length of a training step, in median answer times (default 0.8)"),
    ("answer-timeout", float, "time after which a try has failed (default 40)"),
)
_RULES = ("ledger", "live-cursor", "frontier", "low-water", "cut", "consumed-set")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "simulate",
        help="prove on this machine that no prompt is lost: the trainer's bookkeeping with simulated answers and crashes",
        description="Run the trainer's own bookkeeping (ledger, sources, window, resume) under a virtual clock, with made-up "
        "answers, failures and crashes. An independent auditor judges what was lost and what was trained twice.",
        epilog="exit status: 0 nothing lost (or another rule than ledger), 1 lost, trained twice or an invariant violated, "
        "2 a bad option\nexample: rljob simulate --seed 7 --prompts 20000 --crashes 25 --failure-rate 0.02 -o json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, kind, text in _NUMBERS:
        parser.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", default=argparse.SUPPRESS, help=text)
    parser.add_argument("--rule", choices=_RULES, default=argparse.SUPPRESS, help="whose resume rule (default ledger, ours)")
    parser.add_argument(
        "--source", choices=("seekable", "replayable"), default=argparse.SUPPRESS, help="kind of source (default seekable)"
    )
    for name, text in (
        ("load-replay-buffer", "train on finished answers of the checkpoint (default yes)"),
        ("keep-rows", "keep rows of undone prompts in the checkpoint (replayable source; default yes)"),
        (
            "free-order",
            "the trainer evicts what comes too late instead of waiting for it (default: with a rule that is not ours)",
        ),
        ("vary", "change P, G, ages, caps and the use of the buffer at every resume (default no)"),
    ):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text", help="text (default) or a JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulate and report."""
    try:
        from rljob_workload.core.simulation.report import report, text_of
        from rljob_workload.core.simulation.settings import SettingsError, SimSettings
        from rljob_workload.core.simulation.world import World
    except ModuleNotFoundError as error:
        raise UserError(f"the trainer is not installed here ({error.name} is missing); install rljob[workload]") from None
    given: dict[str, Any] = {name: value for name, value in vars(options).items() if name not in ("run", "output")}
    settings = SimSettings(**given)
    try:
        outcome = World(settings).run()
    except SettingsError as error:
        raise UserError(str(error)) from None
    print(json.dumps(report(outcome), indent=2) if options.output == "json" else text_of(outcome))
    return 0 if outcome.clean or settings.rule != "ledger" else 1
