"""The proof's two plots, as SVG written by hand: which attempt trained which prompt, and the reward over the wall clock."""

from __future__ import annotations

from collections.abc import Sequence

from dev.proof.moments import Hit
from dev.proof.run import Outcome

_TRAINED, _UNDONE, _FILTERED, _SKIPPED, _TEXT, _LINE = "#2e7d32", "#e6a23c", "#b8c4ce", "#b3261e", "#444", "#1565c0"
_COLOURS = {Hit.SAVE: "#b3261e", Hit.COMMIT: "#7b1fa2", Hit.RESUME: "#e6a23c"}
_OTHER = "#9e9e9e"
_WIDTH, _LEFT, _RIGHT = 960, 84, 16
#: Steps in one point of the reward's curve.
_SMOOTH = 20


def coverage(outcome: Outcome) -> str:
    """One line an attempt: ordinals that it trained and the final weights have, and those that were rolled back."""
    found = outcome.audit
    attempts = sorted({attempt for attempt, _ in [*found.kept, *found.undone]})
    row = 12
    height = 64 + row * len(attempts) + 44
    scale = (_WIDTH - _LEFT - _RIGHT) / max(1, found.handed_out)
    parts = _begin(height, f"Prompts by ordinal, trained by attempt (0 to {found.handed_out - 1:,})")
    parts += _legend(
        [(_TRAINED, "trained"), (_UNDONE, "rolled back, answered again"), (_FILTERED, "filtered"), (_SKIPPED, "skipped")]
    )
    for index, attempt in enumerate(attempts):
        top = 46 + index * row
        parts.append(_label(top + 9, str(attempt)))
        for steps, colour in ((found.undone, _UNDONE), (found.kept, _TRAINED)):
            mine = sorted(ordinal for life, ordinals in steps if life == attempt for ordinal in ordinals)
            parts += _bars(mine, scale, top, row - 3, colour)
    top = 54 + row * len(attempts)
    parts.append(_label(top + 14, "all"))
    done = sorted(ordinal for _, ordinals in found.kept for ordinal in ordinals)
    parts += _bars(sorted(found.filtered_ordinals), scale, top, 18, _FILTERED)
    parts += _bars(done, scale, top, 18, _TRAINED)
    parts += _bars(sorted(found.skipped), scale, top, 18, _SKIPPED)
    return "\n".join([*parts, "</svg>", ""])


def reward(outcome: Outcome) -> str:
    """Mean reward of the answers of each step, over accumulated seconds; a vertical line for every kill."""
    lines = outcome.metrics
    seconds = [line["elapsed_seconds"] for line in lines]
    most = max(seconds, default=1.0)
    height, top, bottom = 320, 46, 280
    across, up = (_WIDTH - _LEFT - _RIGHT) / most, bottom - top
    parts = _begin(height, "Reward over accumulated seconds of training; vertical lines: SIGKILL")
    parts += _legend([(colour, str(hit)) for hit, colour in _COLOURS.items()] + [(_OTHER, "elsewhere")])
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - value * up
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(_label(y + 4, f"{value:g}"))
    for number in range(5):
        x = _LEFT + number / 4 * most * across
        parts.append(
            f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle" fill="{_TEXT}">{number / 4 * most:.0f} s</text>'
        )
    for kill in outcome.kills:
        before = [line["elapsed_seconds"] for line in lines if line["attempt"] <= kill.attempt]
        x = _LEFT + (max(before, default=0.0)) * across
        colour = _COLOURS.get(Hit(kill.hit), _OTHER)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{colour}" stroke-opacity="0.55"/>')
    for attempt in sorted({line["attempt"] for line in lines}):
        mine = [line for line in lines if line["attempt"] == attempt]
        points = []
        for at in range(0, len(mine), _SMOOTH):
            part = mine[at : at + _SMOOTH]
            x = _LEFT + part[len(part) // 2]["elapsed_seconds"] * across
            points.append(f"{x:.1f},{bottom - sum(line['reward'] for line in part) / len(part) * up:.1f}")
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{_LINE}" stroke-width="1.6"/>')
    return "\n".join([*parts, "</svg>", ""])


def _begin(height: int, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="10" y="18" font-size="13" fill="{_TEXT}">{title}</text>',
    ]


def _legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    parts, x = [], _LEFT
    for colour, text in entries:
        parts.append(f'<text x="{x}" y="36" fill="{colour}">■ <tspan fill="{_TEXT}">{text}</tspan></text>')
        x += 30 + 6 * len(text)
    return parts


def _label(y: float, text: str) -> str:
    return f'<text x="{_LEFT - 8}" y="{y:.0f}" text-anchor="end" fill="{_TEXT}">{text}</text>'


def _bars(ordinals: Sequence[int], scale: float, top: int, height: int, colour: str) -> list[str]:
    """Neighbouring ordinals as one rectangle; what is less than half a pixel apart is drawn as one."""
    parts, at = [], 0
    while at < len(ordinals):
        end = at
        while end + 1 < len(ordinals) and (ordinals[end + 1] - ordinals[end]) * scale < 0.5 + scale:
            end += 1
        x, width = _LEFT + ordinals[at] * scale, max(0.6, (ordinals[end] - ordinals[at] + 1) * scale)
        parts.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}" fill="{colour}"/>')
        at = end + 1
    return parts
