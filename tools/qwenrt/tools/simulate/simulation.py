"""Many replicas behind a router: one heap of events, in order of time."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from qwenrt.runtime.routing import by_prefix, least_outstanding, prefix_key

from .cost_model import CostModel
from .histogram import Histogram
from .replica import EngineShape, Outcome, Replica
from .workload import Arrival

POLICIES = ("least-outstanding", "prefix", "round-robin")
_MOST_SAMPLES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """So many equal engines, and how requests are shared among them."""

    engine: EngineShape
    cost: CostModel
    replicas: int = 1
    policy: str = "least-outstanding"
    """One of POLICIES."""
    max_imbalance: int = 8192
    """Policy prefix: tokens that a prefix's home may have to do more than the least busy replica."""


def _doubles() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Results:
    """What the requests and the replicas of a simulation went through; one entry a finished request, in order of their ends."""

    due: array[float] = field(default_factory=_doubles)
    ttft: array[float] = field(default_factory=_doubles)
    """Seconds to the first token."""
    e2e: array[float] = field(default_factory=_doubles)
    """Seconds to the last token."""
    new_tokens: array[float] = field(default_factory=_doubles)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    refused: int = 0
    """Requests that no engine of this shape takes."""
    preemptions: int = 0
    steps: int = 0
    busy: float = 0.0
    """Seconds that replicas spent in steps, all together."""
    used_block_seconds: float = 0.0
    peak_used_blocks: int = 0
    """Of the replica that held the most at once."""
    end: float = 0.0
    """When the last request finished."""
    gaps: Histogram = field(default_factory=Histogram)
    """Seconds between two tokens of a request."""
    timeline: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Time, running and waiting requests, and used KV blocks of all replicas."""

    def add(self, outcome: Outcome) -> None:
        """Count a finished request."""
        request = outcome.request
        self.due.append(outcome.due)
        self.ttft.append(outcome.first - outcome.due)
        self.e2e.append(outcome.ended - outcome.due)
        self.new_tokens.append(request.num_generated)
        self.prompt_tokens += request.num_prompt
        self.cached_tokens += request.num_cached or 0
        self.preemptions += request.num_preemptions
        self.end = outcome.ended


class Simulation:
    """A run of a cluster; `run` may be called once."""

    def __init__(self, cluster: Cluster, on_progress: Callable[[int], None] | None = None) -> None:
        """on_progress is called now and then with the number of requests that have come."""
        self.results = Results()
        self.replicas = [Replica(cluster.engine, cluster.cost, self.results.gaps) for _ in range(cluster.replicas)]
        self._cluster = cluster
        self._on_progress = on_progress
        self._outstanding = [0] * cluster.replicas
        self._events: list[tuple[float, int]] = []
        self._next_sample = 0.0
        self._interval = 1e-3

    def run(self, arrivals: Iterable[Arrival]) -> Results:
        """Let the requests come, in order of time, and all of them end."""
        number = 0
        for number, arrival in enumerate(arrivals, 1):
            self._run_until(arrival.due)
            self._send(arrival, number)
            if self._on_progress is not None and number % 1000 == 0:
                self._on_progress(number)
        self._run_until(math.inf)
        for replica in self.replicas:
            self.results.steps += replica.steps
            self.results.busy += replica.busy
            self.results.used_block_seconds += replica.used_block_seconds
            self.results.peak_used_blocks = max(self.results.peak_used_blocks, replica.peak_used_blocks)
        return self.results

    def _send(self, arrival: Arrival, number: int) -> None:
        token_ids = arrival.token_ids()
        index = self._route(token_ids, number)
        replica = self.replicas[index]
        before = replica.next_event
        cost = len(token_ids) + arrival.new_tokens
        if not replica.submit(arrival, token_ids):
            self.results.refused += 1
            return
        self._outstanding[index] += cost
        if replica.next_event != before:
            heapq.heappush(self._events, (replica.next_event, index))

    def _route(self, token_ids: list[int], number: int) -> int:
        cluster, outstanding = self._cluster, self._outstanding
        if cluster.replicas == 1:
            return 0
        if cluster.policy == "least-outstanding":
            return least_outstanding(outstanding)
        if cluster.policy == "prefix":
            return by_prefix(prefix_key(token_ids, cluster.engine.block_size), outstanding, cluster.max_imbalance)
        return (number - 1) % cluster.replicas

    def _run_until(self, time: float) -> None:
        """Advance every replica whose next event is before `time`."""
        events = self._events
        while events and events[0][0] <= time:
            now, index = heapq.heappop(events)
            replica = self.replicas[index]
            if replica.next_event != now:
                continue  # it was cut short
            if now >= self._next_sample:
                self._sample(now)
            for outcome in replica.advance():
                self.results.add(outcome)
                self._outstanding[index] -= outcome.request.num_prompt + outcome.new_tokens
            if replica.next_event < math.inf:
                heapq.heappush(events, (replica.next_event, index))

    def _sample(self, now: float) -> None:
        """Note how full the replicas are; at doubled intervals once there are many notes."""
        timeline = self.results.timeline
        running = sum(len(replica.scheduler.running) for replica in self.replicas)
        waiting = sum(len(replica.scheduler.waiting) for replica in self.replicas)
        timeline.append((now, running, waiting, sum(replica.used_blocks for replica in self.replicas)))
        if len(timeline) > _MOST_SAMPLES:
            del timeline[1::2]
            self._interval *= 2
        self._next_sample = now + self._interval
