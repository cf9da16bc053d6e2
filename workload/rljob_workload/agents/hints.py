"""An agent that asks again with a hint: `python -m rljob_workload.agents.hints [--turns N]`.

A prompt of the copy task is `123=`. The model answers `193`, and is told which digits were right: the next turn's prompt is
`123=193:1.3=`. The reward is the mean share of right digits over the turns, and what counts as correct is the last answer.

All that an agent has to do: take rollouts, talk to the model under each one's `base_url`, report a reward; `loop` does the
first and the last. It may be written in any language; docs/agents.md describes the requests. A turn's prompt begins with
everything said so far.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import aiohttp

from rljob_workload.agents import loop

#: Seconds before a turn is asked for again.
RETRY_SECONDS = 1.0


class TurnError(Exception):
    """The model did not answer; the message says why."""


async def play(session: aiohttp.ClientSession, rollout: dict[str, Any], turns: int) -> dict[str, Any]:
    """One rollout from its first prompt to its result."""
    expected, text, shares = rollout["expected"], rollout["prompt"], []
    for turn in range(turns):
        try:
            said = await answer(session, rollout, text)
        except TurnError as err:
            return {"error": f"turn {turn + 1}: {err}"}
        right = [a == b for a, b in zip(said.ljust(len(expected)), expected, strict=False)]
        shares.append(sum(right) / len(expected))
        hint = "".join(digit if known else "." for digit, known in zip(expected, right, strict=True))
        text += f"{said}:{hint}="
    return {"reward": sum(shares) / turns, "correct": said == expected}


async def answer(session: aiohttp.ClientSession, rollout: dict[str, Any], prompt: str) -> str:
    """What the model says. A server that is full or hangs up is asked once more; a turn that is repeated counts once.

    Raises TurnError.
    """
    body, wait, why = {"model": rollout["model"], "prompt": prompt}, 0.0, ""
    for _ in range(2):
        await asyncio.sleep(wait)
        try:
            async with session.post(rollout["base_url"] + "/completions", json=body) as response:
                if response.status == 200:
                    text: str = (await response.json())["choices"][0]["text"]
                    return text
                wait, why = loop.retry_after(response, RETRY_SECONDS), f"{response.status} {await response.text()}"
                if response.status != 503:
                    break
        except loop.DROPPED as err:
            wait, why = RETRY_SECONDS, f"{type(err).__name__}: {err}"
    raise TurnError(why)


def main() -> None:
    """Play until the run is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=2, help="answers to each prompt")
    turns = parser.parse_args().turns
    loop.run(lambda session, rollout: play(session, rollout, turns))


if __name__ == "__main__":
    main()
