"""Optimisation profiles for whatever limits an engine may have."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwenrt.exporter.tensorrt.profiles import dimension_ranges, plan_profiles, size_range
from qwenrt.runtime.engine_dir import EngineManifest, Limits, ModelSpec
from qwenrt.runtime.plan import Range

MODEL = ModelSpec(
    architecture="Qwen3ForCausalLM",
    num_layers=28,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rope_theta=1e6,
    rope_type="default",
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    attention_bias=False,
    num_experts=0,
    num_experts_per_token=0,
    moe_intermediate_size=0,
    num_parameters=596049920,
    num_active_parameters=596049920,
)


def manifest(sequences: int, tokens: int, length: int = 40960, block_size: int = 32) -> EngineManifest:
    return EngineManifest(
        producer="test",
        target="tensorrt",
        model=MODEL,
        dtype="bfloat16",
        weights="bfloat16",
        kv_dtype="bfloat16",
        block_size=block_size,
        limits=Limits(max_num_seqs=sequences, max_num_batched_tokens=tokens, max_model_len=length),
        eos_token_ids=(1,),
        opset=23,
        plugin_version=1,
    )


def test_decode_takes_a_token_a_sequence_and_prefill_a_full_step() -> None:
    decode, prefill = plan_profiles(manifest(64, 1024))
    sequences, blocks = Range(min=1, opt=32, max=64), Range(min=1, opt=1280, max=1280)
    pool = Range(min=1, opt=32767, max=32767)
    assert (decode.name, prefill.name) == ("decode", "prefill")
    assert decode.num_tokens == decode.num_seqs == decode.num_logits == sequences
    assert prefill == dataclasses.replace(decode, name="prefill", num_tokens=Range(min=1, opt=1024, max=1024))
    assert (decode.max_blocks, decode.num_blocks) == (blocks, pool)
    assert pool.max * 2 * 8 * 32 * 128 < 2**31 <= (pool.max + 1) * 2 * 8 * 32 * 128


def test_query_start_has_an_element_more_than_there_are_sequences() -> None:
    ranges = dimension_ranges(plan_profiles(manifest(64, 1024))[0])
    assert ranges["S"] == Range(min=1, opt=32, max=64)
    assert ranges["S + 1"] == Range(min=2, opt=33, max=65)
    assert set(ranges) == {"T", "S", "S + 1", "R", "max_blocks", "num_blocks"}


@pytest.mark.parametrize("limits", [(1000, 1200), (100, 1200), (1, 1), (1, 8)])
def test_sizes_of_reported_bad_profiles(limits: tuple[int, int]) -> None:
    """T02: an opt above max where min was above max / 2, and a min of 0."""
    check_order(manifest(*limits))


@pytest.mark.parametrize(("largest", "usual"), [(1200, 5000), (8, 0), (0, 8), (1, 1), (-3, -3)])
def test_a_range_is_ordered_and_above_zero_whatever_is_asked_for(largest: int, usual: int) -> None:
    size = size_range(largest, usual=usual)
    assert 1 <= size.min <= size.opt <= size.max


@given(
    tokens=st.integers(1, 1 << 20),
    share=st.floats(0, 1),
    length=st.integers(1, 1 << 20),
    block_size=st.integers(1, 1024),
)
def test_ranges_are_ordered_for_any_limits(tokens: int, share: float, length: int, block_size: int) -> None:
    check_order(manifest(max(1, int(tokens * share)), tokens, length, block_size))


def check_order(engine: EngineManifest) -> None:
    profiles = plan_profiles(engine)
    for profile in profiles:
        for name, size in dimension_ranges(profile).items():
            assert 1 <= size.min <= size.opt <= size.max < 2**31, (profile.name, name)
    decode, prefill = profiles
    limits = engine.limits
    assert decode.num_tokens.max == decode.num_seqs.max == limits.max_num_seqs
    assert prefill.num_tokens.max == limits.max_num_batched_tokens
    assert decode.max_blocks.max * engine.block_size >= limits.max_model_len
