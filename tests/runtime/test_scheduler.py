from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qwenrt.runtime import SamplingParams
from qwenrt.runtime.engine_dir import Limits
from qwenrt.runtime.request import Request, RequestStatus
from qwenrt.runtime.sampling.sampler import SequenceSampler
from qwenrt.runtime.scheduler import Scheduler

from .prefix_model import VOCAB_SIZE, PrefixModel, alone

BLOCK_SIZE = 4


def make_request(prompt: list[int], max_tokens: int, name: str = "r") -> Request:
    params = SamplingParams(temperature=0.0)
    return Request(
        request_id=name,
        token_ids=list(prompt),
        num_prompt=len(prompt),
        max_tokens=max_tokens,
        sampler=SequenceSampler(params, prompt, (), 0),
    )


def make_scheduler(
    num_blocks: int = 16, *, budget: int = 8, max_seqs: int = 4, prefix_caching: bool = True
) -> Scheduler:
    limits = Limits(max_num_seqs=max_seqs, max_num_batched_tokens=budget, max_model_len=64)
    return Scheduler(limits, BLOCK_SIZE, num_blocks, prefix_caching)


def check_invariants(scheduler: Scheduler, requests: list[Request]) -> None:
    """Every block is counted, every request is in one place."""
    pool = scheduler.pool
    held = Counter(block for request in requests for block in request.block_ids)
    assert [held[block] for block in range(pool.num_blocks)] == pool._references
    assert {block for block in range(pool.num_blocks) if not held[block]} == set(pool._free)
    for request in requests:
        places = (scheduler.waiting.count(request), scheduler.running.count(request))
        assert (
            places
            == {
                RequestStatus.WAITING: (1, 0),
                RequestStatus.RUNNING: (0, 1),
                RequestStatus.FINISHED: (0, 0),
            }[request.status]
        )
        if request.status is RequestStatus.RUNNING:
            assert len(request.block_ids) == -(-request.num_computed // BLOCK_SIZE)
        else:
            assert not request.block_ids
        if request.status is RequestStatus.WAITING:
            assert request.num_computed == 0


def run_step(scheduler: Scheduler, model: PrefixModel) -> int:
    """One step; returns how many tokens it computed."""
    plan = scheduler.plan()
    assert len(plan.chunks) <= scheduler.limits.max_num_seqs
    assert sum(chunk.count for chunk in plan.chunks) <= scheduler.limits.max_num_batched_tokens
    scheduler.commit(plan, model.execute(plan))
    for chunk in plan.chunks:
        if chunk.request.num_generated >= chunk.request.max_tokens:
            scheduler.finish(chunk.request)
    return sum(chunk.count for chunk in plan.chunks)


def run_all(scheduler: Scheduler, model: PrefixModel, requests: list[Request], max_steps: int = 2000) -> None:
    for _ in range(max_steps):
        if all(request.status is RequestStatus.FINISHED for request in requests):
            return
        assert run_step(scheduler, model) > 0
        check_invariants(scheduler, requests)
    pytest.fail("requests starve")


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts and failing steps: no block leaks, none is shared in error, and nobody's tokens change."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(12)
        self.model = PrefixModel(12, BLOCK_SIZE)
        self.requests: list[Request] = []
        self.names = itertools.count()

    # Prompts over few letters, so that prefixes are shared often.
    @rule(
        start=st.integers(0, 24),
        tail=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 16),
    )
    def add(self, start: int, tail: list[int], max_tokens: int) -> None:
        request = make_request(alone([1], start)[:start] + tail, max_tokens, str(next(self.names)))
        assert self.scheduler.blocks_for_alone(request.num_prompt, max_tokens) <= self.scheduler.pool.num_blocks
        self.requests.append(request)
        self.scheduler.add(request)

    @precondition(lambda self: any(r.status is not RequestStatus.FINISHED for r in self.requests))
    @rule()
    def step(self) -> None:
        assert run_step(self.scheduler, self.model) > 0

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data(), right=st.integers(0, 6), wrong=st.integers(0, 3))
    def guess(self, data: st.DataObject, right: int, wrong: int) -> None:
        request = data.draw(st.sampled_from(self.scheduler.running))
        room = request.max_tokens - request.num_generated - 1
        truth = alone(request.token_ids, right)[request.num_tokens :]
        request.drafts = (truth + [VOCAB_SIZE] * wrong)[:room]

    @rule(computed=st.booleans())
    def failing_step(self, computed: bool) -> None:
        plan = self.scheduler.plan()
        if computed:
            self.model.execute(plan)
        self.scheduler.rollback(plan)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.finish(data.draw(st.sampled_from(self.requests)))

    @invariant()
    def blocks_and_places_agree(self) -> None:
        check_invariants(self.scheduler, self.requests)

    @invariant()
    def tokens_are_those_of_the_request_alone(self) -> None:
        for request in self.requests:
            prompt = request.token_ids[: request.num_prompt]
            assert request.token_ids == alone(prompt, request.num_generated)

    def teardown(self) -> None:
        run_all(self.scheduler, self.model, self.requests)
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase


def test_preempted_requests_finish_with_their_own_tokens() -> None:
    scheduler, model = make_scheduler(16), PrefixModel(16, BLOCK_SIZE)
    requests = [make_request([i, 2, 3, 4, 0, 1, 2, i], 24) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    run_all(scheduler, model, requests)
    assert scheduler.num_preemptions > 0
    for request in requests:
        assert request.token_ids == alone(request.token_ids[:8], 24)


def test_a_request_that_is_its_own_victim_is_in_one_queue() -> None:
    scheduler, model = make_scheduler(5, budget=16), PrefixModel(5, BLOCK_SIZE)
    older, younger = make_request([0] * 8, 4), make_request([1] * 8, 4)
    scheduler.add(older)
    scheduler.add(younger)
    run_step(scheduler, model)
    plan = scheduler.plan()
    assert [chunk.request for chunk in plan.chunks] == [older]
    assert plan.preempted == [younger]
    scheduler.commit(plan, model.execute(plan))
    run_all(scheduler, model, [older, younger])
    assert younger.token_ids == alone([1] * 8, 4)


def test_a_cached_prompt_computes_only_its_last_token() -> None:
    scheduler, model = make_scheduler(), PrefixModel(16, BLOCK_SIZE)
    for expected in (0, 4):
        request = make_request([1, 2, 3, 4, 0, 1, 2, 3], 2)
        scheduler.add(request)
        run_all(scheduler, model, [request])
        assert request.num_cached == expected


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    scheduler, model = make_scheduler(budget=64), PrefixModel(16, BLOCK_SIZE)
    requests = [make_request([1, 2, 3, 4] * 3 + [i], 2) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    assert run_step(scheduler, model) == 13
    assert run_step(scheduler, model) == 3 + 1
    assert [request.num_cached for request in requests] == [0, 12, 12, 12]


def test_without_prefix_caching_nothing_is_found_again() -> None:
    scheduler, model = make_scheduler(prefix_caching=False), PrefixModel(16, BLOCK_SIZE)
    for _ in range(2):
        request = make_request([1] * 12, 2)
        scheduler.add(request)
        run_all(scheduler, model, [request])
        assert request.num_cached == 0


def test_the_least_recently_used_prefix_is_evicted_first_and_its_end_before_its_start() -> None:
    scheduler, model = make_scheduler(6, budget=32), PrefixModel(6, BLOCK_SIZE)

    def cached(prompt: list[int]) -> int:
        request = make_request(prompt, 1)
        scheduler.add(request)
        run_all(scheduler, model, [request])
        return request.num_cached

    old, new = [1] * 9, [2] * 9
    assert cached(old) == cached(new) == 0
    # Four blocks hold prefixes; this takes the two that hold none and one more.
    assert cached([3] * 9) == 0
    assert cached(new) == 8
    assert cached(old) == 4


def test_a_long_prompt_does_not_stop_running_requests() -> None:
    scheduler, model = make_scheduler(), PrefixModel(16, BLOCK_SIZE)
    short, long = make_request([1, 2], 20), make_request([3] * 30, 1)
    scheduler.add(short)
    run_step(scheduler, model)
    scheduler.add(long)
    while long.num_generated == 0:
        before = short.num_generated
        run_step(scheduler, model)
        assert short.num_generated == before + 1
