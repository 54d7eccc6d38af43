"""Log-probabilities of a prompt's tokens equal transformers', cold, cached, in chunks and preempted (CASES K07)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwenrt.plugins import RequestError
from qwenrt.runtime import LLM, RequestOutput, SamplingParams
from tests.oracle import Oracle

PROMPT = np.random.default_rng(5).integers(0, 290, 17).tolist()
LONG = np.random.default_rng(6).integers(0, 290, 150).tolist()
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, prompt_logprobs=3, ignore_eos=True)


def check(output: RequestOutput, oracle: Oracle) -> None:
    """The prompt's log-probabilities are those of transformers."""
    prompt = output.prompt_token_ids
    with torch.inference_mode():
        expected = torch.log_softmax(oracle.model(torch.tensor([prompt])).logits[0], -1)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    known = [one for one in output.prompt_logprobs if one is not None]
    assert [one.token_id for one in known] == prompt[1:]
    for row, one in zip(expected[:-1], known, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert list(one.top.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Oracle:
    return Oracle(tiny_checkpoint)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 4}])
def test_cold_and_warm_and_in_chunks(tiny_engine: Path, oracle: Oracle, options: dict[str, Any]) -> None:
    llm = LLM(tiny_engine, num_kv_blocks=64, **options)
    plain = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    [alone] = llm.generate([LONG], plain)
    for _ in range(2):
        prompts = [PROMPT, LONG, [7], LONG[:40]]
        outputs = llm.generate(prompts, [PARAMS, PARAMS, PARAMS, plain])
        for output in outputs[:3]:
            check(output, oracle)
        assert outputs[1].outputs[0].token_ids == alone.outputs[0].token_ids
        assert outputs[2].prompt_logprobs == [None]
        assert outputs[3].prompt_logprobs is None
    assert llm.engine.scheduler.pool.num_free == 64


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 4}, {"speculative": {"method": "ngram"}}]
)
def test_a_prompt_may_be_scored_alone_and_fill_the_context(
    tiny_engine: Path, oracle: Oracle, options: dict[str, Any]
) -> None:
    llm = LLM(tiny_engine, num_kv_blocks=64, **options)
    full = np.random.default_rng(7).integers(0, 290, llm.engine.limits.max_model_len).tolist()
    only = SamplingParams(max_tokens=0, prompt_logprobs=3, n=2)
    outputs = llm.generate([full, PROMPT, [7], LONG], [only, only, only, PARAMS])
    for output in outputs:
        check(output, oracle)
    assert [[one.finish_reason for one in output.outputs] for output in outputs[:3]] == [["length"] * 2] * 3
    assert [one.token_ids for output in outputs[:3] for one in output.outputs] == [[]] * 6
    assert len(outputs[3].outputs[0].token_ids) == 4
    assert llm.engine.scheduler.pool.num_free == 64


def test_preempted_and_beside_others_and_n_times(tiny_engine: Path, oracle: Oracle) -> None:
    llm = LLM(tiny_engine, num_kv_blocks=8, max_num_seqs=4, enable_prefix_caching=False)
    growing = SamplingParams(temperature=0.0, max_tokens=60, prompt_logprobs=3, ignore_eos=True)
    outputs = llm.generate([LONG[start : start + 60] for start in range(3)], growing)
    assert llm.engine.scheduler.num_preemptions > 0
    for output in outputs:
        check(output, oracle)
    twice = SamplingParams(temperature=0.0, max_tokens=2, n=2, prompt_logprobs=3, ignore_eos=True)
    [output] = LLM(tiny_engine, num_kv_blocks=64).generate([PROMPT], twice)
    check(output, oracle)
    assert output.outputs[0].token_ids == output.outputs[1].token_ids


def test_speculation_does_not_disturb_them(tiny_engine: Path, oracle: Oracle) -> None:
    llm = LLM(tiny_engine, num_kv_blocks=64, speculative={"method": "ngram"})
    many = SamplingParams(temperature=0.0, max_tokens=30, prompt_logprobs=3, ignore_eos=True)
    outputs = llm.generate([[3, 4, 5] * 8, LONG], [many, many])
    for output in outputs:
        check(output, oracle)
        assert output.outputs[0].token_ids == oracle.greedy(output.prompt_token_ids, 30)


def test_a_failed_step_and_logits_that_are_not_finite(tiny_engine: Path, oracle: Oracle) -> None:
    llm = LLM(tiny_engine, num_kv_blocks=64, max_num_batched_tokens=32, max_num_seqs=4)
    real = llm.engine.backend

    class Failing:
        calls = 0

        def execute(self, inputs: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise OSError("once")
            return real.execute(inputs)

    llm.engine.backend = Failing()  # type: ignore[assignment]
    job = llm.engine.add_request("one", LONG, PARAMS)
    while not job.finished:
        try:
            llm.engine.step()
        except OSError:
            continue
    check(job.output(), oracle)

    class Nan:
        def execute(self, inputs: Any) -> Any:
            logits = real.execute(inputs)
            logits[0] = np.nan
            return logits

    llm.engine.backend = Nan()  # type: ignore[assignment]
    [output] = llm.generate([PROMPT], PARAMS)
    assert output.outputs[0].finish_reason == "abort"
    assert "the model gave nan as a logit" in str(output.outputs[0].stop_reason)
    llm.engine.backend = real
    [output] = llm.generate([PROMPT], PARAMS)
    check(output, oracle)


@pytest.mark.parametrize("value", [-1, 21, True, 1.0, "1"])
def test_values_that_are_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)
