"""Damaged manifests: what people, scripts and attackers write. Each depends on the generator's state alone."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import yaml

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/copy.yaml"

WORDS = (
    "",
    "x",
    "\x00",
    "\u202e",
    "é",
    "💥",
    "x" * 3000,
    "true",
    "1e400",
    "0x10",
    "../..",
    "{{ x }}",
    "-",
    "%s%d{0}{x}",
    "'",
    "\ud800",
    "null",
)
NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    3,
    7,
    4096,
    4097,
    2**31,
    2**53,
    2**63,
    2**64,
    -(2**63),
    10**39,
    1.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"a": 1}, {"": {}}, {"a.b[0]": None}, [None])
TEXTS = (
    "",
    "{",
    "[" * 5000,
    "{a: " * 3000,
    "- " * 3000,
    "a: &a [*a]",
    "a: *b",
    "? [x]\n: y",
    "<<: 3",
    "kind: RLJob\n<<: [{a: 1}, 2]",
    "!!python/object/apply:os.system [id]",
    "kind: !!int x",
    "x: " + "9" * 5000,
    "x: 1:2:3:4",
    "%YAML 9.9\n---\na",
    "---\n...\n---\n",
    "\t- x",
    "a: |\n b\n  c\nd",
    "\ufeffkind: RLJob",
    "kind: RLJob\nkind: RLJob",
    "2001-99-99: x",
    "x: 2001-99-99",
)


def bomb(rng: random.Random) -> str:
    """Aliases of aliases."""
    width, height = rng.choice((2, 9, 30)), rng.choice((3, 20, 60))
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, height)]
    return "\n".join([*lines, "kind: RLJob", f"spec: {{trainer: {{template: *a{height - 1}}}}}"])


class Mutator:
    """Damages the example, in different ways each time."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._manifest = yaml.safe_load(EXAMPLE.read_text())

    def manifest(self) -> dict[str, Any]:
        """The example with one to five places damaged."""
        manifest = copy.deepcopy(self._manifest)
        for _ in range(self._rng.choice((1, 1, 1, 2, 3, 5))):
            self._damage(manifest)
        return dict(manifest)

    def _damage(self, manifest: dict[str, Any]) -> None:
        rng, blocks = self._rng, []
        pending: list[Any] = [manifest]
        while pending:
            block = pending.pop()
            if isinstance(block, dict) and block:
                blocks.append(block)
                pending += block.values()
            elif isinstance(block, list):
                pending += block
        block = rng.choice(blocks)
        key = rng.choice(list(block))
        match rng.randrange(7):
            case 0:
                del block[key]
            case 1 | 2:
                block[key] = rng.choice(NUMBERS)
            case 3:
                block[key] = rng.choice(WORDS)
            case 4:
                block[key] = copy.deepcopy(rng.choice(OTHERS))
            case 5:
                block[rng.choice(WORDS) or "extra"] = block.pop(key)
            case 6:
                block[key] = self._nest(rng.choice((1, 50, 99, 101, 400)), block[key])

    def _nest(self, depth: int, value: Any) -> Any:
        for _ in range(depth):
            value = {"x": value} if self._rng.random() < 0.5 else [value]
        return value

    def text(self) -> str:
        """A text that may hold a manifest."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.05:
            return bomb(rng)
        if kind < 0.15:
            return rng.choice(TEXTS)
        manifest = self.manifest()
        text = json.dumps(manifest)
        if kind >= 0.5 and r"\ud800" not in text and text.count("[") + text.count("{") < 200:  # what libyaml can write
            text = yaml.dump(manifest, Dumper=getattr(yaml, "CDumper", yaml.Dumper), allow_unicode=rng.random() < 0.5)
        if kind > 0.8:
            for _ in range(rng.choice((1, 3, 20))):
                place = rng.randrange(len(text))
                text = (
                    text[:place]
                    + rng.choice(("", ":", "\n", "  ", "*", "&a ", "{", "]", "\t", "- ", "'", "\x85", "#"))
                    + text[place + 1 :]
                )
        return text
