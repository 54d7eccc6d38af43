"""One engine in simulated time: the shipped Scheduler over a clock that a cost model moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwenrt.runtime.engine_dir import Limits
from qwenrt.runtime.request import Request, StepPlan
from qwenrt.runtime.scheduler import Scheduler

from .cost_model import CostModel, Work
from .histogram import Histogram
from .workload import Arrival

_ANSWER_TOKEN = 2**31 - 1
"""Every generated token: two answers are in the same cached block only if all before it, their prompts, are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What the scheduler is given: as `LLM` gives it to the one of a real engine."""

    limits: Limits
    block_size: int
    num_kv_blocks: int
    enable_prefix_caching: bool = True


@dataclass(eq=False, slots=True)
class Outcome:
    """What became of a request, in seconds of simulated time."""

    due: float
    request: Request
    new_tokens: int
    """Tokens that it asked for."""
    first: float = math.nan
    """When its first token came."""
    ended: float = math.nan
    paused: float | None = None
    """When its last token came, if it was preempted since."""


class Replica:
    """Takes arrivals and ends them: `submit` when one comes, `advance` when `next_event` is reached, both in order of time.

    Steps in which every running request only decodes and nothing else can happen are taken together: one plan whose chunks
    carry the tokens of the steps to come as drafts, all of them right. The scheduler then reserves, counts and publishes the
    same blocks as it would step by step, and the clock moves by the sum of the steps' times. An arrival cuts such a run short
    at the end of the step that it falls into.
    """

    def __init__(self, shape: EngineShape, cost: CostModel, gaps: Histogram) -> None:
        """gaps: where the seconds between two tokens of a request are counted."""
        self.scheduler = Scheduler(shape.limits, shape.block_size, shape.num_kv_blocks, shape.enable_prefix_caching)
        self.next_event = math.inf
        self.busy = 0.0
        """Seconds spent in steps."""
        self.used_block_seconds = 0.0
        """Integral over time of the blocks that are held."""
        self.peak_used_blocks = 0
        self.steps = 0
        self._cost = cost
        self._gaps = gaps
        self._outcomes: dict[Request, Outcome] = {}
        self._arriving: list[Request] = []
        self._plan: StepPlan | None = None
        self._started = 0.0
        self._steps = 0
        """Steps taken together since `_started`; 0 while idle."""
        self._context = 0
        """Tokens that the first of them sees."""
        self._decoding = False
        """Whether all running requests were in the last step, and every one got a token."""
        self._blocked = False
        """Whether the scheduler has looked at the waiting requests and nothing has changed since."""

    @property
    def used_blocks(self) -> int:
        """KV blocks that requests hold."""
        return self.scheduler.pool.num_blocks - self.scheduler.pool.num_free

    def submit(self, arrival: Arrival, token_ids: list[int]) -> bool:
        """Take a request that comes now; False if the engine would refuse it."""
        limits, scheduler = self.scheduler.limits, self.scheduler
        max_tokens = min(arrival.new_tokens, limits.max_model_len - len(token_ids))
        if max_tokens < 1 or scheduler.blocks_for_alone(len(token_ids), max_tokens) > scheduler.pool.num_blocks:
            return False
        request = Request(
            request_id="",
            token_ids=token_ids,
            num_prompt=len(token_ids),
            max_tokens=max_tokens,
            sampler=None,
        )
        self._outcomes[request] = Outcome(arrival.due, request, arrival.new_tokens)
        self._arriving.append(request)
        if self._steps == 0:
            self._begin(arrival.due)
        elif self._steps > 1:
            self._cut(arrival.due)
        return True

    def advance(self) -> list[Outcome]:
        """End the steps that end at `next_event` and begin what follows; returns the requests that are finished."""
        now, steps = self.next_event, self._steps
        plan = self._plan or self._plan_together(steps)
        self.scheduler.commit(plan, [[_ANSWER_TOKEN] * steps for chunk in plan.chunks if chunk.samples])
        seconds, used = now - self._started, self.used_blocks
        self.busy += seconds
        self.used_block_seconds += seconds * used
        self.peak_used_blocks = max(self.peak_used_blocks, used)
        self.steps += steps
        self._decoding = len(plan.chunks) == len(self.scheduler.running) and all(chunk.samples for chunk in plan.chunks)
        if self._plan is None:
            self._gaps.add(seconds / steps, steps * len(plan.chunks))
        else:
            self._count_tokens(plan, now)
        finished = self._finish(plan, now)
        # What was just admitted may have been all that there was room for in the step, and not in the next.
        self._blocked = bool(self.scheduler.waiting) and self._decoding and not finished and self._nothing_new(plan)
        self._begin(now)
        return finished

    def _nothing_new(self, plan: StepPlan) -> bool:
        return all(chunk.count == 1 + len(chunk.drafts) for chunk in plan.chunks) and not plan.preempted

    def _count_tokens(self, plan: StepPlan, now: float) -> None:
        """Note the first tokens and the gaps that end with this step."""
        for request in plan.preempted:
            if request.num_generated:
                self._outcomes[request].paused = self._started
        gaps = 0
        for chunk in plan.chunks:
            if not chunk.samples:
                continue
            request = chunk.request
            if request.num_generated == 1:
                self._outcomes[request].first = now
            elif request.num_preemptions and (paused := self._outcomes[request].paused) is not None:
                self._gaps.add(now - paused, 1)
                self._outcomes[request].paused = None
            else:
                gaps += 1
        self._gaps.add(now - self._started, gaps)

    def _finish(self, plan: StepPlan, now: float) -> list[Outcome]:
        finished = []
        for chunk in plan.chunks:
            request = chunk.request
            if len(request.token_ids) - request.num_prompt >= request.max_tokens:
                self.scheduler.finish(request)
                outcome = self._outcomes.pop(request)
                outcome.ended = now
                finished.append(outcome)
        return finished

    def _begin(self, now: float) -> None:
        """Start the next step, or several, with what has arrived by now."""
        scheduler = self.scheduler
        for request in self._arriving:
            self._blocked = self._blocked and bool(scheduler.waiting)
            scheduler.add(request)
        self._arriving.clear()
        self._started = now
        self._plan = None
        if not scheduler.running and not scheduler.waiting:
            self._steps, self.next_event = 0, math.inf
            return
        if self._decoding and (self._blocked or not scheduler.waiting):
            self._steps, self._context = self._most_steps()
            if self._steps > 1:
                self.next_event = now + self._seconds_together(self._steps)
                return
        self._steps = 1
        self._plan = scheduler.plan()
        assert self._plan.chunks, "requests are waiting and none can run"
        self.next_event = now + self._cost.seconds(Work.of(self._plan.chunks))

    def _most_steps(self) -> tuple[int, int]:
        """How many steps until a request finishes, the step's tokens or the blocks run out; and how much the first one sees."""
        running = self.scheduler.running
        most, context = self.scheduler.limits.max_num_batched_tokens // len(running), 0
        for request in running:
            length = len(request.token_ids)
            context += length
            left = request.max_tokens + request.num_prompt - length
            if left < most:
                most = left
        free, size = self.scheduler.pool.num_free, self.scheduler.block_size
        if len(running) * (most // size + 1) > free:
            while most > 1 and self._blocks_missing(most) > free:
                most //= 2
        return most, context

    def _blocks_missing(self, steps: int) -> int:
        size = self.scheduler.block_size
        return sum(
            -(-(request.num_computed + steps) // size) - len(request.block_ids) for request in self.scheduler.running
        )

    def _seconds_together(self, steps: int) -> float:
        """Seconds of so many decoding steps; each sees one token more of every sequence than the one before."""
        count = len(self.scheduler.running)
        seen = steps * self._context + count * (steps * (steps - 1) // 2)
        return steps * self._cost.without_attention(count, count) + self._cost.per_seen * seen

    def _cut(self, due: float) -> None:
        """Let the steps end with the one that `due` falls into."""
        low, high = 1, self._steps
        while low < high:
            middle = (low + high) // 2
            if self._started + self._seconds_together(middle) >= due:
                high = middle
            else:
                low = middle + 1
        self._steps = low
        self.next_event = self._started + self._seconds_together(low)

    def _plan_together(self, steps: int) -> StepPlan:
        for request in self.scheduler.running:
            request.drafts = [_ANSWER_TOKEN] * (steps - 1)
        plan = self.scheduler.plan()
        assert all(chunk.count == steps for chunk in plan.chunks) and not plan.preempted
        return plan
