"""Speculation changes how many steps an answer takes, never its tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenrt.exporter import export
from qwenrt.runtime import LLM, ConfigError, SamplingParams
from qwenrt.runtime.model_runner import StepInputs
from qwenrt.runtime.speculation import Acceptance, PromptLookup, SpeculativeConfig, StepCost

from .test_scheduler import BLOCK_SIZE, PrefixModel, alone, make_request, make_scheduler, run_all

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
NUM_BLOCKS = 40
# Its greedy answers fall into loops, as those of random weights do: guesses are right often, and wrong often enough.
PROMPTS = [np.random.default_rng(seed).integers(0, 256, length).tolist() for seed, length in enumerate((3, 9, 17, 30))]


@pytest.fixture(scope="module")
def engine_dir(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engine") / "small-blocks"
    export(tiny_checkpoint, out, block_size=4)
    return out


@pytest.fixture
def always_guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess although this machine's times, which a test cannot foresee, may say that it does not pay."""
    monkeypatch.setattr(StepCost, "line", lambda self: None)


def load(engine_dir: Path, **options: Any) -> LLM:
    return LLM(engine_dir, **{"num_kv_blocks": NUM_BLOCKS, "max_model_len": 96, "threads": 1, **options})


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True),
        SamplingParams(temperature=0.6, seed=3, max_tokens=48, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.5, seed=5, n=2, max_tokens=40, ignore_eos=True, frequency_penalty=0.05, top_p=0.9),
        SamplingParams(temperature=0.0, max_tokens=48, stop_token_ids=list(range(0, 256, 9)), min_tokens=12),
    ],
    ids=["greedy", "seeded", "penalties", "stops"],
)
@pytest.mark.usefixtures("always_guessing")
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 24, "max_num_batched_tokens": 12, "max_num_seqs": 4}])
def test_answers_are_those_without_speculation(
    engine_dir: Path, params: SamplingParams, options: dict[str, Any]
) -> None:
    plain, guessing = load(engine_dir, **options), load(engine_dir, **options, speculative=NGRAM)
    for batch in (PROMPTS[:1], PROMPTS):
        expected = [output.outputs for output in plain.generate(batch, params)]
        given = [output.outputs for output in guessing.generate(batch, params)]
        for ones, others in zip(expected, given, strict=True):
            for one, other in zip(ones, others, strict=True):
                assert (other.token_ids, other.text, other.finish_reason) == (
                    one.token_ids,
                    one.text,
                    one.finish_reason,
                )
                assert (other.logprobs is None) == (one.logprobs is None)
                for left, right in zip(one.logprobs or [], other.logprobs or [], strict=True):
                    assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
    assert guessing.engine.scheduler.pool.num_free == guessing.engine.scheduler.pool.num_blocks
    if params.temperature == 0.0 and not options:
        assert guessing.engine.timings.steps < plain.engine.timings.steps
        assert guessing.engine.speculator is not None
        stats = guessing.engine.speculator.stats
        assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
        assert stats.mean_acceptance_length == 1 + stats.num_accepted_tokens / stats.num_drafts


class FixedBackend:
    """The same distribution after every token."""

    def __init__(self, logits: list[float], vocab_size: int) -> None:
        self.row = np.full(vocab_size, -np.inf, np.float32)
        self.row[: len(logits)] = logits

    def execute(self, inputs: StepInputs) -> Any:
        return np.tile(self.row, (len(inputs.logits_indices), 1))


@pytest.mark.usefixtures("always_guessing")
def test_sampled_tokens_have_the_distribution_of_the_model(engine_dir: Path) -> None:
    probabilities = [0.6, 0.25, 0.1, 0.05]
    llm = load(engine_dir, speculative=NGRAM, max_model_len=256, num_kv_blocks=1300)
    llm.engine.backend = FixedBackend(np.log(probabilities).tolist(), llm.engine.manifest.model.vocab_size)
    (output,) = llm.generate([[0, 0, 0, 0]], SamplingParams(seed=1, n=20, max_tokens=200, ignore_eos=True))
    counts = Counter(token for answer in output.outputs for token in answer.token_ids)
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.stats.num_accepted_tokens > 300
    chi_square = sum((counts[token] - 4000 * p) ** 2 / (4000 * p) for token, p in enumerate(probabilities))
    # The 99.9th percentile with three degrees of freedom.
    assert chi_square < 16.3


@pytest.mark.usefixtures("always_guessing")
def test_a_stop_among_accepted_guesses_ends_the_answer_there(engine_dir: Path) -> None:
    plain, guessing = load(engine_dir), load(engine_dir, speculative=NGRAM)
    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    text = plain.generate(PROMPTS[0], greedy)[0].outputs[0].text
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, stop=[text[-3:]])
    expected = plain.generate(PROMPTS[0], params)[0].outputs[0]
    given = guessing.generate(PROMPTS[0], params)[0].outputs[0]
    assert expected.finish_reason == "stop"
    assert (given.text, given.token_ids, given.stop_reason) == (expected.text, expected.token_ids, expected.stop_reason)


def test_guesses_take_no_block_and_no_token_that_others_need() -> None:
    scheduler, model = make_scheduler(4, budget=3), PrefixModel(4, BLOCK_SIZE)
    older, younger = make_request([1] * 3, 5), make_request([2] * 3, 5)
    for request in (older, younger):
        scheduler.add(request)
        plan = scheduler.plan()
        scheduler.commit(plan, model.execute(plan))
    while older.num_tokens < 5 or younger.num_tokens < 5:
        plan = scheduler.plan()
        scheduler.commit(plan, model.execute(plan))
    older.drafts = alone(older.token_ids, 3)[older.num_tokens :]
    plan = scheduler.plan()
    assert [(chunk.request, chunk.count) for chunk in plan.chunks] == [(older, 1), (younger, 1)]
    scheduler.commit(plan, model.execute(plan))
    run_all(scheduler, model, [])
    assert older.token_ids == alone([1] * 3, older.num_generated)


def test_rejected_guesses_give_their_blocks_back() -> None:
    scheduler, model = make_scheduler(8), PrefixModel(8, BLOCK_SIZE)
    request = make_request([1] * 3, 16)
    scheduler.add(request)
    plan = scheduler.plan()
    scheduler.commit(plan, model.execute(plan))
    right = alone(request.token_ids, 2)[request.num_tokens :]
    request.drafts = [*right, 9, 9, 9]
    plan = scheduler.plan()
    assert scheduler.pool.num_free == 6 - 1
    scheduler.commit(plan, model.execute(plan))
    assert request.token_ids == alone([1] * 3, 4)
    assert (request.num_computed, scheduler.pool.num_free) == (6, 6)


def test_a_lookup_proposes_what_followed_the_longest_and_latest_run() -> None:
    config = SpeculativeConfig(method="ngram", prompt_lookup_min=1, prompt_lookup_max=2)
    lookup = PromptLookup(config)
    assert lookup.propose([1, 2, 3], 4) == []
    assert lookup.propose([1, 2, 3, 7, 2, 8, 1, 2], 2) == [3, 7]
    assert lookup.propose([1, 2, 3, 7, 2, 8, 1, 2, 5, 2], 2) == [5, 2]
    assert PromptLookup(config).propose([4, 5, 4, 5], 5) == [4, 5, 4, 5, 4]


def test_guesses_stop_when_checking_costs_more_than_it_gains() -> None:
    memory_bound, compute_bound = StepCost(), StepCost()
    assert memory_bound.best_guess(5, 0.5, 1) == 5
    for tokens in (1, 2, 5, 1, 6):
        memory_bound.record(tokens, 0.1 + 0.001 * tokens)
        compute_bound.record(tokens, 0.001 + 0.1 * tokens)
    assert memory_bound.line() == pytest.approx((0.1, 0.001))
    assert memory_bound.best_guess(5, 0.8, 1) == 5
    assert memory_bound.best_guess(5, 0.01, 64) == 0
    assert compute_bound.best_guess(5, 0.9, 1) == 0


def test_acceptance_follows_what_was_accepted_and_fades_back() -> None:
    acceptance = Acceptance()
    assert acceptance.rate == 0.5
    for _ in range(100):
        acceptance.record(4, 0)
    assert acceptance.rate < 0.05
    for _ in range(400):
        acceptance.fade()
    assert acceptance.rate > 0.4
    for _ in range(100):
        acceptance.record(4, 4)
    assert acceptance.rate > 0.95


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "has no method"),
        ({"method": "eagle"}, "method is 'eagle', must be \"ngram\""),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0, must be 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"method": "ngram", "prompt_lookup_min": 5}, "prompt_lookup_min is 5, must be at most prompt_lookup_max"),
        ({"method": "ngram", "tokens": 3}, "has no 'tokens'; it takes: method"),
    ],
)
def test_a_wrong_configuration_is_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_mapping(value)
