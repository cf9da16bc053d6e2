"""The proof's table and plot in docs/lossless.md. The same proof gives the same files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_BEGIN, _END = "<!-- made by `make proof-sim`: begin -->", "<!-- made by `make proof-sim`: end -->"
_LOST, _AGAIN, _TEXT = "#b3261e", "#e6a23c", "#444"
_ROW, _LEFT, _WIDTH = 34, 150, 720


def publish(directory: Path, result: Mapping[str, Any]) -> None:
    """Replace the generated part of lossless.md, and write the plot beside it."""
    page = directory / "lossless.md"
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page}: the markers of the generated part are missing")
    page.write_text(f"{before}{begin}\n{_generated(result)}{end}{after}", encoding="utf-8")
    (directory / "lossless.svg").write_text(_plot([row for row in result["rules"] if row["failure_rate"]]), encoding="utf-8")


def summary(result: Mapping[str, Any]) -> str:
    """What the proof found, for the terminal."""
    lines = [
        f"{result['schedules']:,} schedules, {result['prompts']:,} prompts, {result['crashes']:,} crashes, "
        f"{result['withdrawn_tries']:,} withdrawn tries, {result['operations']:,} operations checked",
        f"lost {result['lost']}, trained twice {result['trained_twice']}, violations {result['invariant_violations']}; "
        f"{result['answered_again_after_crashes']:,} prompts answered again after crashes, exactly those without saved answers",
    ]
    caught = [row for row in result["mutants"] if row["schedule"]]
    lines.append(f"mutants caught: {len(caught)} of {len(result['mutants'])}")
    lines += [
        f"  {row['rule']:20} {row['failure_rate']:5.0%} failures: lost {row['lost']:5}, "
        f"trained again {row['trained_again']:5}, extra answers {row['extra_answers_percent']:5} %"
        for row in result["rules"]
    ]
    return "\n".join(lines)


def _generated(result: Mapping[str, Any]) -> str:
    rules = [
        "| rule | lost | trained again | extra answers | lost at 1 % failures | trained again | extra answers |",
        "|---" * 7 + "|",
    ]
    clean = {row["rule"]: row for row in result["rules"] if not row["failure_rate"]}
    failing = {row["rule"]: row for row in result["rules"] if row["failure_rate"]}
    for rule, row in clean.items():
        cells = [f"`{rule}`"]
        for part in (row, failing[rule]):
            cells += [f"{part['lost']:,}", f"{part['trained_again']:,}", f"{part['extra_answers_percent']} %"]
        rules.append("| " + " | ".join(f"**{cell}**" if rule.startswith("ledger") else cell for cell in cells) + " |")
    mutants = ["| mistake put into the core | first schedule that shows it: lost, trained twice, violations |", "|---|---|"]
    mutants += [
        f"| {row['mutant']} | {row['lost']}, {row['trained_twice']}, {row['violations']} |" for row in result["mutants"]
    ]
    return (
        "\n" + "\n".join(rules) + "\n\n![Prompts lost and trained again, by rule](lossless.svg)\n\n"
        f"Schedules: **{result['schedules']:,}** ({result['prompts']:,} prompts, {result['crashes']:,} crashes, "
        f"{result['withdrawn_tries']:,} withdrawn tries, {result['operations']:,} operations, the books checked after each). "
        f"Lost **{result['lost']}**, trained twice **{result['trained_twice']}**, violations "
        f"**{result['invariant_violations']}**. Answered again after crashes: "
        f"{result['answered_again_after_crashes']:,} prompts, each time exactly those whose answers were in no checkpoint.\n\n"
        + "\n".join(mutants)
        + "\n\n"
    )


def _plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Bars by rule, at 1 % failed tries."""
    most = max(1, *(max(row["lost"], row["trained_again"]) for row in rows))
    height = 60 + _ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="10" y="20" fill="{_TEXT}">Of 19,200 prompts with 17 crashes and 1 % failed tries:</text>',
        f'<text x="330" y="20" fill="{_LOST}">■ lost</text><text x="390" y="20" fill="{_AGAIN}">■ trained again</text>',
    ]
    scale = (_WIDTH - _LEFT - 70) / most
    for index, row in enumerate(rows):
        top = 38 + index * _ROW
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 17}" text-anchor="end" fill="{_TEXT}">{row["rule"]}</text>')
        for offset, name, colour in ((0, "lost", _LOST), (13, "trained_again", _AGAIN)):
            width = max(1, round(row[name] * scale))
            parts.append(f'<rect x="{_LEFT}" y="{top + offset}" width="{width}" height="11" fill="{colour}"/>')
            parts.append(f'<text x="{_LEFT + width + 5}" y="{top + offset + 10}" fill="{_TEXT}">{row[name]:,}</text>')
    return "\n".join([*parts, "</svg>", ""])
