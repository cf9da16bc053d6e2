"""An agent that asks again with a hint: `python -m rljob_workload.agents.hints [--turns N]`.

A prompt of the copy task is `123=`. The model answers `193`, and is told which digits were right: the next turn's prompt is
`123=193:1.3=`. The reward is the mean share of right digits over the turns, and what counts as correct is the last answer.

All that an agent has to do: take rollouts, talk to the model under each one's `base_url`, report a reward. It may be written
in any language; docs/agents.md describes the requests. A turn's prompt begins with everything said so far.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp

#: Requests at once; the trainer hands out no more prompts than generation.maxInFlightPrompts.
AT_ONCE = 64


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


async def finish(session: aiohttp.ClientSession, url: str, rollout: dict[str, Any], turns: int) -> None:
    """Play a rollout and report it. 410: the trainer has given it up meanwhile, which is none of our business."""
    result = await play(session, rollout, turns)
    async with session.post(f"{url}/rollouts/{rollout['id']}/result", json=result) as response:
        if response.status not in (200, 410):
            print(f"{rollout['id']}: {response.status} {await response.text()}", file=sys.stderr)


async def serve(url: str, token: str, turns: int) -> None:
    """Play rollouts until the run is over."""
    headers = {"Authorization": f"Bearer {token}"}
    connector = aiohttp.TCPConnector(limit=AT_ONCE + 1)
    timeout = aiohttp.ClientTimeout(total=None)  # a turn may wait while the model is trained
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        playing: set[asyncio.Task[None]] = set()
        while True:
            async with session.get(f"{url}/rollouts/next", params={"max": AT_ONCE}) as response:
                response.raise_for_status()
                answer = await response.json()
            if answer["over"]:
                return
            for rollout in answer["rollouts"]:
                task = asyncio.create_task(finish(session, url, rollout, turns))
                playing.add(task)
                task.add_done_callback(playing.discard)


def main() -> None:
    """Where the servers are and where the token is stands in the environment."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=2, help="answers to each prompt")
    turns = parser.parse_args().turns
    url = os.environ["RLJOB_DP_OPENAI_SERVER_BASE_URLS"].split(",")[0]
    token = Path(os.environ["RLJOB_CONTROL_TOKEN_FILE"]).read_text().strip()
    asyncio.run(serve(url, token, turns))


if __name__ == "__main__":
    main()
