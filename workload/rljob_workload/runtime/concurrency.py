"""Ray's concurrency groups: control calls get through whatever else an actor is busy with.

A Ray actor runs a bounded number of calls at once (asyncio actors 1,000, others one) and queues the rest, in order. With
all of them taken by data calls, a call for the actor's status would wait for them, just when it is needed most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

#: The group of calls that read, pause, resume or end something and never wait for data.
CONTROL = "control"


def control[Method: Callable[..., Any]](method: Method) -> Method:
    """Mark a method of an actor's class as a control call."""
    marked: Method = ray.method(concurrency_group=CONTROL)(method)
    return marked


def actor_class(kind: type, control_calls: int) -> Any:
    """Ray's actor class of a plain class, with room for so many control calls at once."""
    return ray.remote(concurrency_groups={CONTROL: control_calls})(kind)
