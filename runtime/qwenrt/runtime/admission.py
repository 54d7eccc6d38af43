"""Whose turn it is: the order in which requests that wait outside the engine are let in."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What the queue asks of its entries."""

    priority: int
    """Lower goes first."""
    tenant: str
    """Those of equal priority take turns by tenant."""


Entry = TypeVar("Entry", bound=Waiting)


class AdmissionQueue(Generic[Entry]):
    """Lower `priority` first, then tenants in turn, then order of arrival.

    Turns are start-time fair queueing (Goyal, Vin and Cheng, 1996) with equal weights and requests of equal cost.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Entry]] = []
        self._arrivals = itertools.count()
        self._round = 0
        self._last_round: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, entry: Entry) -> None:
        """Add an entry."""
        turn = max(self._round, self._last_round.get(entry.tenant, -1) + 1)
        self._last_round[entry.tenant] = turn
        heapq.heappush(self._heap, (entry.priority, turn, next(self._arrivals), entry))

    def peek(self) -> Entry:
        """The entry whose turn it is."""
        return self._heap[0][-1]

    def pop(self) -> Entry:
        """Take that entry out."""
        _, turn, _, entry = heapq.heappop(self._heap)
        self._round = max(self._round, turn)
        if not self._heap:
            self._last_round.clear()
        return entry

    def remove(self, entry: Entry) -> None:
        """Take an entry out, whose turn it need not be."""
        self._heap = [item for item in self._heap if item[-1] is not entry]
        heapq.heapify(self._heap)
