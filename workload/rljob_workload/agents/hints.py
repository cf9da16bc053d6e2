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

from rljob_workload.agents import loop
from rljob_workload.agents.client import Client


async def play(client: Client, rollout: dict[str, Any], turns: int) -> dict[str, Any]:
    """One rollout from its first prompt to its result."""
    expected, text, shares = rollout["expected"], rollout["prompt"], []
    for turn in range(turns):
        status, answer = await client.post(rollout["base_url"] + "/completions", {"model": rollout["model"], "prompt": text})
        if status != 200:
            return {"error": f"turn {turn + 1}: {status} {answer}"}
        said = answer["choices"][0]["text"]
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
    loop.run(lambda client, rollout: play(client, rollout, turns))


if __name__ == "__main__":
    main()
