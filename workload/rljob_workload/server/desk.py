"""Between the HTTP server and the pumps: requests wait here for the next decode slice of their replica.

The desk has no lock of its own: the collector's guards it. While the engines are down nobody takes anything, so requests wait
and none fails. What a client no longer waits for is not sent to an engine; where it is there already, its answer is dropped.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rljob_workload.algorithm.batch import HTTP, Answer, Request, Sampling

#: Answers that may wait for one replica; an engine has far fewer slots.
MOST_WAITING = 10_000

#: Called once, in the pump's thread and under the lock: with all answers, or with why there are none.
Deliver = Callable[[list[Answer] | Exception], None]


class DeskFullError(Exception):
    """So many answers are waited for that one more would only wait too."""


class DeskClosedError(Exception):
    """The run is over."""


@dataclass(slots=True)
class _Ticket:
    request: Request
    deliver: Deliver
    replica: int
    taken: bool = False
    answers: list[Answer] = field(default_factory=list)


class Desk:
    """Requests of all replicas."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By replica: when its newest request came, by the clock.
        self._newest: dict[int, float] = defaultdict(float)
        self._tickets: dict[int, _Ticket] = {}
        #: By replica: numbers of requests that wait for its next slice, in order.
        self._waiting: dict[int, dict[int, None]] = defaultdict(dict)
        #: By replica: requests that somebody waits for and its engine has, and answers that are waited for.
        self._running: dict[int, int] = defaultdict(int)
        self._owed: dict[int, int] = defaultdict(int)
        self._next = 0
        self._closed: Exception | None = None

    def submit(self, replica: int, tokens: tuple[int, ...], answers: int, sampling: Sampling | None, deliver: Deliver) -> int:
        """Ask for answers to one prompt; `sampling` None: as the job says. Returns its number.

        Raises DeskFullError, DeskClosedError.
        """
        if self._closed is not None:
            raise self._closed
        if self._owed[replica] + answers > MOST_WAITING:
            raise DeskFullError(f"{self._owed[replica]} answers are waited for; at most {MOST_WAITING} may be")
        self._newest[replica] = self._clock()
        self._next += 1
        request = Request((HTTP, self._next), tokens, answers, sampling=sampling)
        self._tickets[self._next] = _Ticket(request, deliver, replica)
        self._waiting[replica][self._next] = None
        self._owed[replica] += answers
        return self._next

    def newest(self, replica: int) -> float:
        """When the replica's newest request came, by the clock; 0: none came yet."""
        return self._newest[replica]

    def waits(self, replica: int) -> bool:
        """Whether a request waits for the replica's next slice."""
        return bool(self._waiting[replica])

    def holds(self, number: int | None) -> bool:
        """Whether the request of this number is still to be answered."""
        return number in self._tickets

    def wants(self, replica: int) -> bool:
        """Whether somebody waits for an answer of this replica."""
        return bool(self._tickets) and (bool(self._waiting[replica]) or self._running[replica] > 0)

    def take(self, replica: int) -> list[Request]:
        """All requests that wait for this replica: its next slice has them."""
        taken = [self._tickets[number] for number in self._waiting[replica]]
        self._waiting[replica] = {}
        self._running[replica] += len(taken)
        for ticket in taken:
            ticket.taken = True
        return [ticket.request for ticket in taken]

    def arrive(self, answers: Iterable[Answer]) -> None:
        """Answers that a slice brought."""
        for answer in answers:
            ticket = self._tickets.get(answer.tag[1])
            if ticket is None:
                continue  # nobody waits for it any more
            ticket.answers.append(answer)
            if len(ticket.answers) == ticket.request.answers:
                self._drop(answer.tag[1])
                ticket.deliver(ticket.answers)

    def cancel(self, number: int, why: Exception | None = None) -> None:
        """Nobody waits for it any more; `why` is delivered, where somebody did."""
        ticket = self._tickets.get(number)
        if ticket is not None:
            self._drop(number)
            if why is not None:
                ticket.deliver(why)

    def close(self, why: Exception) -> None:
        """The end: whoever waits is told why."""
        self._closed = why
        for number in list(self._tickets):
            self.cancel(number, why)

    def _drop(self, number: int) -> None:
        ticket = self._tickets.pop(number)
        self._owed[ticket.replica] -= ticket.request.answers
        if ticket.taken:
            self._running[ticket.replica] -= 1
        else:
            del self._waiting[ticket.replica][number]
