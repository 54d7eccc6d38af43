"""Continuous batching: which tokens of which requests a step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .adapters import AdapterSlots
from .block_pool import BlockPool
from .engine_dir import Limits
from .prefix_cache import extend_block_hashes
from .request import Chunk, Request, RequestStatus, StepPlan

MAX_PROMPT_ROWS = 64
"""Rows of logits that a step gives for prompts whose log-probabilities are wanted: a vocabulary's width each."""


class Scheduler:
    """Shares the tokens of each step and the KV blocks among the requests, first come first served.

    A step is `plan`, then `commit` when it was computed or `rollback` when it was not. When blocks run out, the youngest running
    request gives its blocks up and is computed again later.
    """

    def __init__(
        self,
        limits: Limits,
        block_size: int,
        num_blocks: int,
        enable_prefix_caching: bool = True,
        num_adapter_slots: int = 0,
    ) -> None:
        self.limits = limits
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.adapters = AdapterSlots(num_adapter_slots)
        self.enable_prefix_caching = enable_prefix_caching
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request; the caller has made sure that it fits the pool when it is alone."""
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Take a request out, finished or aborted, and free its blocks; a second call does nothing."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release_adapter(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self._shrink(request, 0)

    def plan(self) -> StepPlan:
        """Reserve blocks and choose the chunks of the next step.

        There is at least one chunk whenever there is a request, since every request fits an empty pool.
        """
        chunks: list[Chunk] = []
        preempted: list[Request] = []
        budget = self.limits.max_num_batched_tokens
        rows = MAX_PROMPT_ROWS
        position = 0
        running = self.running
        spare: int | None = None
        while position < len(running) and budget > 0:
            request = running[position]
            count = len(request.token_ids) - request.num_computed
            if count > budget or request.prompt_logprobs is not None:
                count = self._next_count(request, budget, rows)
            drafts: tuple[int, ...] = ()
            if request.drafts:
                spare = self._spare_blocks() if spare is None else spare
                drafts = self._affordable_drafts(request, budget - (len(running) - position - 1), spare)
            missing = self._missing_blocks(request, count)
            if missing > 0:
                while missing > self.pool.num_free and position < len(running):
                    preempted.append(self._preempt_youngest())
                if position == len(running):
                    break
            if drafts and spare is not None:
                extra = self._missing_blocks(request, count + len(drafts)) - missing
                spare -= extra
                missing += extra
            position += 1
            if count == 0:
                continue
            chunks.append(self._reserve(request, count, missing, drafts))
            budget -= count + len(drafts)
            rows -= count if request.prompt_logprobs is not None else 0
        if not preempted:
            self._admit(chunks, budget, rows)
        return StepPlan(chunks, preempted)

    def commit(self, plan: StepPlan, tokens: Sequence[Sequence[int]]) -> None:
        """Count the plan's tokens as computed, publish the blocks they fill, and append the sampled `tokens`.

        tokens: for each chunk that samples, in plan order, the drafts that the sampler drew and one token more. A request that
        got no token must be finished before the next plan.
        """
        sampled = iter(tokens)
        for request, _, count, samples, drafts in plan.chunks:
            full_before = request.num_computed // self.block_size
            request.num_computed += count - len(drafts)
            if samples:
                new = next(sampled)
                request.token_ids += new
                if request.drafts:
                    request.drafts = []
                if drafts:
                    request.num_computed += max(len(new) - 1, 0)
                    self._shrink(request, self._blocks_for(request.num_computed))
            full = request.num_computed // self.block_size
            if self.enable_prefix_caching and full > full_before:
                self._extend_hashes(request)
                for index in range(full_before, full):
                    self.pool.cache.publish(request.block_hashes[index], request.block_ids[index])

    def rollback(self, plan: StepPlan) -> None:
        """Give back what `plan` reserved; what was computed before it stays computed."""
        for chunk in plan.chunks:
            if chunk.request.status is RequestStatus.RUNNING:
                self._shrink(chunk.request, self._blocks_for(chunk.request.num_computed))

    def blocks_for_alone(self, num_prompt: int, max_tokens: int) -> int:
        """Blocks that a request needs at most; the last token that it samples is never written to the cache."""
        return self._blocks_for(num_prompt + max_tokens - 1)

    def _next_count(self, request: Request, budget: int, rows: int) -> int:
        """How many of a request's tokens the step computes, if it may compute `budget` and give `rows` for prompts."""
        most = budget if request.prompt_logprobs is None else min(budget, rows)
        return min(request.num_tokens - request.num_computed, most)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _missing_blocks(self, request: Request, count: int) -> int:
        return -(-(request.num_computed + count) // self.block_size) - len(request.block_ids)

    def _missing_own_blocks(self, request: Request) -> int:
        """Blocks that the tokens which a request has now lack; negative while it holds blocks for drafts."""
        return self._blocks_for(request.num_tokens) - len(request.block_ids)

    def _spare_blocks(self) -> int:
        """Free blocks that the tokens of running requests will not take."""
        return self.pool.num_free - sum(self._missing_own_blocks(request) for request in self.running)

    def _affordable_drafts(self, request: Request, budget: int, spare: int) -> tuple[int, ...]:
        """The drafts of `request` if they fit the step and take no block that somebody's own tokens need; else none."""
        own, drafts = request.num_tokens - request.num_computed, len(request.drafts)
        if (
            own + drafts > budget
            or self._missing_blocks(request, own + drafts) - self._missing_blocks(request, own) > spare
        ):
            return ()
        return tuple(request.drafts)

    def _reserve(self, request: Request, count: int, missing: int, drafts: tuple[int, ...] = ()) -> Chunk:
        while missing > 0:
            request.block_ids.append(self.pool.allocate())
            missing -= 1
        start = request.num_computed
        samples = start + count == len(request.token_ids)
        return Chunk(request, start, count + len(drafts), samples, drafts)

    def _shrink(self, request: Request, num_blocks: int) -> None:
        self.pool.release(request.block_ids[num_blocks:])
        del request.block_ids[num_blocks:]

    def _preempt_youngest(self) -> Request:
        victim = self.running.pop()
        self._release_adapter(victim)
        self._shrink(victim, 0)
        victim.num_computed = 0
        victim.drafts = []
        victim.status = RequestStatus.WAITING
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _extend_hashes(self, request: Request) -> None:
        root = b"" if request.adapter is None else request.adapter.digest
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, root)

    def _release_adapter(self, request: Request) -> None:
        if request.adapter is not None:
            self.adapters.release(request.adapter)
            request.adapter_slot = -1

    def _admit(self, chunks: list[Chunk], budget: int, rows: int) -> None:
        """Move waiting requests into the step while tokens, blocks, adapters' slots and places last.

        A request whose next block is just being computed by another one waits for it: requests that arrive together with a
        common prefix compute it once.
        """
        if not self.waiting:
            return
        promised = sum(max(self._missing_own_blocks(request), 0) for request in self.running)
        in_flight = {value for request in self.running for value in self._hashes_in_flight(request)}
        deferred: list[Request] = []
        max_seqs = self.limits.max_num_seqs
        while self.waiting and budget > 0 and len(self.running) < max_seqs and len(deferred) < max_seqs:
            request = self.waiting[0]
            if request.adapter is not None and not self.adapters.has_room_for(request.adapter):
                break
            hits: list[int] = []
            if self.enable_prefix_caching and request.prompt_logprobs is None:
                self._extend_hashes(request)
                # The last token is always computed, since its logits are wanted.
                usable = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
                hits = self.pool.cache.find(usable)
                if len(hits) < len(usable) and usable[len(hits)] in in_flight:
                    deferred.append(self.waiting.popleft())
                    continue
            if self._next_count(request, budget, rows) == 0:
                break
            needed = self._blocks_for(request.num_tokens) - len(hits)
            if needed + self.pool.num_free_among(hits) + promised > self.pool.num_free:
                break
            self.waiting.popleft()
            self._start(request, hits)
            count = self._next_count(request, budget, rows)
            chunks.append(self._reserve(request, count, self._missing_blocks(request, count)))
            budget -= count
            rows -= count if request.prompt_logprobs is not None else 0
            promised += self._missing_own_blocks(request)
            in_flight.update(self._hashes_in_flight(request))
        self.waiting.extendleft(reversed(deferred))

    def _start(self, request: Request, hits: list[int]) -> None:
        self.pool.acquire(hits)
        request.block_ids.extend(hits)
        request.num_computed = len(hits) * self.block_size
        if request.num_cached is None:
            request.num_cached = request.num_computed
        if request.adapter is not None:
            request.adapter_slot = self.adapters.acquire(request.adapter)
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def _hashes_in_flight(self, request: Request) -> list[bytes]:
        return request.block_hashes[request.num_computed // self.block_size :]
