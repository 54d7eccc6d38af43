"""Simulated time: the shipped scheduler, and steps taken together end when they would end one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenrt.runtime import scheduler as shipped
from qwenrt.runtime.engine_dir import Limits
from qwenrt.tools.simulate import replica as replica_module
from qwenrt.tools.simulate.cost_model import CostModel
from qwenrt.tools.simulate.histogram import Histogram
from qwenrt.tools.simulate.replica import EngineShape, Replica
from qwenrt.tools.simulate.simulation import Cluster, Results, Simulation
from qwenrt.tools.simulate.workload import Arrival

COST = CostModel(fixed=1e-3, weights=2e-3, knee=4, per_token=1e-4, per_sample=3e-5, per_context=1e-5, per_pair=2e-6)


class StepByStep(Replica):
    """Never takes steps together."""

    def _most_steps(self) -> tuple[int, int]:
        return 1, super()._most_steps()[1]


def shape(num_blocks: int, *, max_seqs: int = 4, budget: int = 16, caching: bool = True) -> EngineShape:
    limits = Limits(max_num_seqs=max_seqs, max_num_batched_tokens=budget, max_model_len=64)
    return EngineShape(limits=limits, block_size=4, num_kv_blocks=num_blocks, enable_prefix_caching=caching)


def run(engine: EngineShape, arrivals: list[Arrival], kind: type[Replica], monkeypatch: pytest.MonkeyPatch) -> Results:
    with monkeypatch.context() as patch:
        patch.setattr("qwenrt.tools.simulate.simulation.Replica", kind)
        return Simulation(Cluster(engine=engine, cost=COST)).run(arrivals)


def test_the_scheduler_is_the_shipped_one() -> None:
    engine = Replica(shape(16), COST, Histogram())
    assert type(engine.scheduler) is shipped.Scheduler
    assert replica_module.Scheduler is shipped.Scheduler
    assert shipped.__file__.endswith("runtime/qwenrt/runtime/scheduler.py")


def test_one_request_takes_what_the_cost_model_says() -> None:
    results = Simulation(Cluster(engine=shape(16), cost=COST)).run([Arrival(0.5, ((-1, 10),), 3)])
    prefill = 1e-3 + 2e-3 * 10 / 4 + 1e-4 * 10 + 3e-5 + 1e-5 * 10 + 2e-6 * 55
    decode = [1e-3 + 2e-3 + 1e-4 + 3e-5 + (1e-5 + 2e-6) * seen for seen in (11, 12)]
    assert list(results.ttft) == pytest.approx([prefill])
    assert list(results.e2e) == pytest.approx([prefill + sum(decode)])
    assert results.gaps.mean == pytest.approx(sum(decode) / 2)
    assert results.steps == 3


arrivals_strategy = st.lists(
    st.tuples(
        st.floats(0, 0.05),
        st.integers(0, 2),  # which prefix
        st.integers(0, 3),  # blocks of it
        st.integers(1, 9),
        st.integers(1, 24),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=60)
@given(drawn=arrivals_strategy, num_blocks=st.integers(12, 40), max_seqs=st.integers(1, 6), caching=st.booleans())
def test_steps_taken_together_end_as_they_would_one_by_one(
    drawn: list[tuple[float, int, int, int, int]], num_blocks: int, max_seqs: int, caching: bool
) -> None:
    due, arrivals = 0.0, []
    for number, (gap, prefix, blocks, own, new) in enumerate(drawn):
        due += gap
        pieces = [(-1 - prefix, 4 * blocks)] if blocks else []
        arrivals.append(Arrival(due, (*pieces, (-10 - number, own)), new))
    engine = shape(num_blocks, max_seqs=max_seqs, caching=caching)
    with pytest.MonkeyPatch.context() as monkeypatch:
        together, single = (run(engine, arrivals, kind, monkeypatch) for kind in (Replica, StepByStep))
    for name in ("due", "ttft", "e2e", "new_tokens"):
        assert list(getattr(together, name)) == pytest.approx(list(getattr(single, name)))
    for name in ("prompt_tokens", "cached_tokens", "refused", "preemptions", "steps"):
        assert getattr(together, name) == getattr(single, name)
    assert together.gaps.count == single.gaps.count
    assert together.busy == pytest.approx(single.busy)


def test_what_the_engine_would_refuse_is_refused_and_what_it_would_cut_is_cut() -> None:
    results = Simulation(Cluster(engine=shape(8), cost=COST)).run(
        [
            Arrival(0.0, ((-1, 64),), 1),
            Arrival(0.0, ((-2, 30),), 4),
            Arrival(0.0, ((-3, 20),), 99),
            Arrival(0.0, ((-4, 5),), 3),
        ]
    )
    assert results.refused == 3
    assert list(results.new_tokens) == [3]
    results = Simulation(Cluster(engine=shape(16), cost=COST)).run([Arrival(0.0, ((-1, 60),), 99)])
    assert list(results.new_tokens) == [4]


def test_a_preempted_request_waits_and_the_gap_is_counted() -> None:
    arrivals = [Arrival(0.0, ((-1 - number, 8),), 20) for number in range(3)]
    results = Simulation(Cluster(engine=shape(12), cost=COST)).run(arrivals)
    assert results.preemptions > 0
    assert results.gaps.percentile(100) > 3 * results.gaps.percentile(50)
    assert results.gaps.count == 3 * 19


@pytest.mark.parametrize("policy", ["least-outstanding", "prefix", "round-robin"])
def test_every_request_ends_under_every_policy(policy: str) -> None:
    arrivals = [
        Arrival(0.002 * number, ((-1 - number % 5, 16), (-100 - number, 5)), 1 + number % 7) for number in range(200)
    ]
    simulation = Simulation(Cluster(engine=shape(40), cost=COST, replicas=4, policy=policy, max_imbalance=64))
    results = simulation.run(arrivals)
    assert len(results.ttft) == 200 and results.refused == 0
    assert set(simulation._outstanding) == {0}
    assert all(not replica.scheduler.running and replica.used_blocks == 0 for replica in simulation.replicas)


def test_the_prefix_policy_finds_more_in_the_caches_than_the_others() -> None:
    arrivals = [Arrival(0.02 * number, ((-1 - number * 7 % 23, 16), (-100 - number, 5)), 4) for number in range(300)]

    def cached(policy: str) -> int:
        cluster = Cluster(engine=shape(40), cost=COST, replicas=8, policy=policy, max_imbalance=64)
        return Simulation(cluster).run(arrivals).cached_tokens

    assert cached("prefix") > 1.3 * cached("least-outstanding")
