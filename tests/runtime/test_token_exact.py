"""Greedy tokens equal to transformers in float32, however the work is cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenrt.exporter import export
from qwenrt.runtime import LLM, SamplingParams
from tests.checkpoints import write_checkpoint
from tests.oracle import Oracle

NUM_NEW = 12
LENGTHS = (1, 2, 15, 16, 17, 64, 131, 600)
LIMITS: dict[str, Any] = {"max_position_embeddings": 1024}

FAST_CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "gqa8-head128-untied-bias-3layers": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
}
SLOW_CONFIGS: dict[str, dict[str, Any]] = {
    f"gqa{group}-head{head_dim}-{'tied' if tied else 'untied'}-{layers}layers{'-bias' if bias else ''}": {
        "num_attention_heads": group * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden + 32,
        "vocab_size": vocab,
        "rope_theta": theta,
        "rms_norm_eps": eps,
    }
    for group, kv_heads, head_dim, tied, layers, bias, hidden, vocab, theta, eps in (
        (1, 2, 64, True, 1, False, 64, 320, 1e6, 1e-6),
        (1, 4, 128, False, 3, False, 96, 333, 1e6, 1e-6),
        (2, 2, 64, True, 5, False, 128, 320, 1e4, 1e-6),
        (2, 4, 64, False, 2, True, 160, 1000, 1e6, 1e-5),
        (2, 1, 128, True, 3, False, 64, 320, 5e6, 1e-6),
        (4, 1, 64, True, 4, True, 96, 512, 1e6, 1e-6),
        (4, 2, 128, False, 2, False, 128, 320, 1e6, 1e-5),
        (4, 2, 64, True, 7, False, 64, 320, 1e6, 1e-6),
        (8, 1, 64, False, 3, False, 160, 400, 1e4, 1e-6),
        (8, 1, 128, True, 2, True, 128, 320, 1e6, 1e-6),
        (8, 2, 64, True, 3, False, 96, 2048, 1e6, 1e-6),
    )
}
ALL_CONFIGS = FAST_CONFIGS | SLOW_CONFIGS


@pytest.mark.parametrize(
    "name", [*FAST_CONFIGS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CONFIGS)]
)
def test_tokens_equal_transformers_alone_batched_cached_chunked_and_preempted(name: str, tmp_path: Path) -> None:
    config = {**LIMITS, **ALL_CONFIGS[name]}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=len(name), **config)
    engine = tmp_path / "engine"
    export(checkpoint, engine, block_size=16)
    vocab_size = config.get("vocab_size", 320)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, vocab_size, length).tolist() for length in LENGTHS]
    oracle = Oracle(checkpoint)
    expected = [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)

    def tokens(llm: LLM, batch: list[list[int]]) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(batch, params)]

    llm = LLM(engine)
    assert [tokens(llm, [prompt])[0] for prompt in prompts] == expected, "alone"
    outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected, "batched, with prefix cache hits"
    assert outputs[-1].num_cached_tokens == 592
    assert tokens(LLM(engine, enable_prefix_caching=False), prompts) == expected, "batched, computed afresh"
    assert tokens(LLM(engine, max_num_batched_tokens=37, max_num_seqs=8), prompts) == expected, "in chunks"
    # All six fit until each needs its fifth block at once.
    growing = [prompts[-1][start : start + 63] for start in range(6)]
    tight = LLM(engine, num_kv_blocks=25, max_num_seqs=8)
    assert tokens(tight, growing) == [oracle.greedy(prompt, NUM_NEW) for prompt in growing], "preempted"
    assert tight.engine.scheduler.num_preemptions > 0
    assert tight.engine.scheduler.pool.num_free == 25
