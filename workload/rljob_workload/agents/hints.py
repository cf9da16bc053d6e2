"""An agent that asks again with a hint: `python -m rljob_workload.agents.hints [--turns N]`.

A prompt of the copy task is `123=`. The model answers `193`, and is told which digits were right: the next turn's prompt is
`123=193:1.3=`. The reward is the mean share of right digits over the turns, and what counts as correct is the last answer.

All that an agent has to do: take rollouts, talk to the model under each one's `base_url`, report a reward; `loop` does the
first and the last. It may be written in any language; docs/agents.md describes the requests. A turn's prompt begins with
everything said so far.
"""

from __future__ import annotations

import argparse
from typing import Any

import aiohttp

from rljob_workload.agents import loop


async def play(session: aiohttp.ClientSession, rollout: dict[str, Any], turns: int) -> dict[str, Any]:
    """One rollout from its first prompt to its result."""
    expected, text, shares = rollout["expected"], rollout["prompt"], []
    for turn in range(turns):
        body = {"model": rollout["model"], "prompt": text}
        async with session.post(rollout["base_url"] + "/completions", json=body) as response:
            if response.status != 200:
                return {"error": f"turn {turn + 1}: {response.status} {await response.text()}"}
            said = (await response.json())["choices"][0]["text"]
        right = [a == b for a, b in zip(said.ljust(len(expected)), expected, strict=False)]
        shares.append(sum(right) / len(expected))
        hint = "".join(digit if known else "." for digit, known in zip(expected, right, strict=True))
        text += f"{said}:{hint}="
    return {"reward": sum(shares) / turns, "correct": said == expected}


def main() -> None:
    """Play until the run is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=2, help="answers to each prompt")
    turns = parser.parse_args().turns
    loop.run(lambda session, rollout: play(session, rollout, turns))


if __name__ == "__main__":
    main()
