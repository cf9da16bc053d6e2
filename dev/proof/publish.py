"""The published proof: docs/proof (JSON, plots, table) and the README's block. The same run gives the same files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dev.proof import plots
from dev.proof.run import Outcome


def summary(outcome: Outcome) -> dict[str, Any]:
    """The figures of a run, for build/proof.json and docs/proof/proof.json."""
    found = outcome.audit
    return {
        "command": f"make proof SEED={outcome.seed}",
        "seed": outcome.seed,
        "steps": outcome.sizes.steps,
        "kills": len(outcome.kills),
        "hits": outcome.hits,
        "lives": outcome.lives,
        "ended_by_themselves": outcome.ended,
        "resumes": found.resumes,
        "seconds": outcome.seconds,
        "lost": len(found.lost),
        "trained_twice": found.trained_twice,
        "violations": found.violation_count,
        "examples": found.violations,
        "handed_out": found.handed_out,
        "trained": found.trained,
        "filtered": found.filtered,
        "skipped": len(found.skipped),
        "skipped_by": found.skipped_by,
        "skipped_never_judged": found.skipped_poisoned,
        "answered_again": found.answered_again,
        "extra_answers": found.extra_answers,
        "rolled_back": {"steps": found.rolled_back_steps, "prompts": found.rolled_back_prompts},
        "live_cursor_lost": found.live_cursor,
        "sizes": asdict(outcome.sizes),
        "table": [asdict(kill) for kill in outcome.kills],
        "skipped_ordinals": {str(ordinal): cause for ordinal, cause in found.skipped.items()},
    }


def publish(outcome: Outcome, root: Path) -> None:
    """Write docs/proof and the README's block."""
    directory = root / "docs" / "proof"
    directory.mkdir(parents=True, exist_ok=True)
    result = summary(outcome)
    (directory / "proof.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (directory / "coverage.svg").write_text(plots.coverage(outcome), encoding="utf-8")
    (directory / "reward.svg").write_text(plots.reward(outcome), encoding="utf-8")
    replace_block(directory / "README.md", _page(result))
    replace_block(root / "README.md", _readme(result))


def replace_block(page: Path, text: str, by: str = "make proof") -> None:
    """Put text between the marks that a page has for the results of a command. Raises ValueError where it has none."""
    begin, end = f"<!-- made by `{by}`: begin -->", f"<!-- made by `{by}`: end -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no place for the result of `{by}`: the marks {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")


def _readme(result: Mapping[str, Any]) -> str:
    hits = ", ".join(f"{count} {where}" for where, count in result["hits"].items())
    return (
        f"{result['steps']:,} steps of the real trainer, {result['kills']} SIGKILLs ({hits}), a judge that raises and hangs: "
        f"{result['handed_out']:,} prompts handed out, **{result['lost']} lost, {result['trained_twice']} trained twice**, "
        f"{result['skipped']} skipped, each with its cause. A saved data-loader place would have lost "
        f"{result['live_cursor_lost']['place']} of them ([docs/proof](docs/proof/README.md)).\n"
    )


def _page(result: Mapping[str, Any]) -> str:
    causes = ", ".join(f"{cause} {count}" for cause, count in result["skipped_by"].items()) or "none"
    rolled, cursor = result["rolled_back"], result["live_cursor_lost"]
    rows = {
        "steps, SIGKILLs, lives, resumes": f"{result['steps']:,}, {result['kills']}, {result['lives']}, {result['resumes']}",
        "prompts handed out": f"{result['handed_out']:,}",
        "trained, filtered": f"{result['trained']:,}, {result['filtered']:,}",
        "**lost**": f"**{result['lost']}**",
        "**trained twice**": f"**{result['trained_twice']}**",
        "skipped, by cause": f"{result['skipped']}: {causes}",
        "... of them rows that the judge never judges": f"{result['skipped_never_judged']}",
        "steps rolled back, with prompts": f"{rolled['steps']}, {rolled['prompts']:,}",
        "answered again because a kill took their answers": f"{result['answered_again']:,}",
        "answers that the final weights do not use": f"{result['extra_answers']:,}",
        "the same kills, had only the loader's place been saved": f"{cursor['place']} lost",
        "... had the finished groups been saved too": f"{cursor['place and buffer']} lost",
        "violations of anything the auditor checks": f"{result['violations']}",
        "wall clock": f"{result['seconds']:,.0f} s",
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    kills = "".join(
        f"| {number} | {kill['attempt']} | {kill['seconds']:.1f} | {kill['step'] or '-'} | {kill['hit']} |\n"
        for number, kill in enumerate(result["table"], 1)
    )
    return (
        f"\n`{result['command']}`, {result['steps']:,} steps.\n\n| | |\n|---|---|\n{table}\n"
        "![Which attempt trained which prompt](coverage.svg)\n\n![Reward over wall clock](reward.svg)\n\n"
        "| kill | attempt | after s | newest step of that life | what it hit |\n|---|---|---|---|---|\n" + kills + "\n"
    )
