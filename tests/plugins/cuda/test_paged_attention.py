"""The CUDA kernels, run by the emulator, give what the NumPy reference gives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qwenrt.plugins.reference import paged_attention
from tests.simt.build import KERNELS, Variant, build, missing

from .binding import EmulatedCuda
from .cases import Array, Call, make_call

FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
DTYPES = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)

# Of attn, absolute and relative: q, the weights and the result are each rounded to the type once. Of the pool: one rounding.
ATTN_TOLERANCE = {FLOAT16: 3e-3, BFLOAT16: 2e-2}
POOL_TOLERANCE = {FLOAT16: 2e-3, BFLOAT16: 1.6e-2}

MIXED = [(70, 200), (1, 300), (0, 40), (129, 129), (2, 65), (1, 1)]


@pytest.fixture(scope="module")
def cuda() -> EmulatedCuda:
    if reason := missing():
        pytest.skip(reason)
    variant = Variant[os.environ.get("SIMT_VARIANT", "FAST")]  # test_memory.py sets these two
    return EmulatedCuda(build(variant, Path(os.environ.get("SIMT_KERNELS", KERNELS))))


def expect(call: Call) -> tuple[Array, Array]:
    """The reference in float32 on the same rounded inputs; K and V are rounded as they go to the pool."""
    tensors = {
        name: x.astype(np.float32) if name in ("qkv", "q_norm", "k_norm") else x for name, x in call.tensors.items()
    }
    return paged_attention(**tensors, **call.attributes)


def check(cuda: EmulatedCuda, call: Call, **options: Any) -> tuple[Array, Array]:
    """Runs the call, compares it with the reference, and returns what the kernels gave."""
    attn, pool = cuda.paged_attention(**call.tensors, **call.attributes, **options)
    expected_attn, expected_pool = expect(call)
    dtype, end = attn.dtype, call.tensors["query_start"][-1]
    bound = ATTN_TOLERANCE[dtype]
    np.testing.assert_allclose(attn[:end].astype(np.float32), expected_attn[:end], rtol=bound, atol=bound)
    assert not attn[end:].astype(np.float32).any()
    bound = POOL_TOLERANCE[dtype]
    np.testing.assert_allclose(pool.astype(np.float32), expected_pool.astype(np.float32), rtol=bound, atol=1e-4)
    untouched = expected_pool.view(np.uint16) == call.tensors["kv_cache"].view(np.uint16)
    np.testing.assert_array_equal(pool.view(np.uint16)[untouched], expected_pool.view(np.uint16)[untouched])
    return attn, pool


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_mixed_batch(cuda: EmulatedCuda, dtype: Any, head_dim: int, block_size: int) -> None:
    check(
        cuda, make_call(MIXED, dtype=dtype, head_dim=head_dim, block_size=block_size, padding_rows=3, shared_blocks=1)
    )


@DTYPES
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (8, 2), (8, 1), (16, 1), (14, 2), (3, 1)])
def test_query_heads_per_kv_head(cuda: EmulatedCuda, dtype: Any, num_heads: int, num_kv_heads: int) -> None:
    call = make_call(
        [(40, 90), (1, 77), (3, 20), (17, 17)], dtype=dtype, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    check(cuda, call)


@DTYPES
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257])
def test_decode_lengths_around_edges(cuda: EmulatedCuda, dtype: Any, length: int) -> None:
    check(cuda, make_call([(1, length)], dtype=dtype))


@pytest.mark.parametrize("rows", [8, 9, 16, 17, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("before", [0, 1, 63, 64])
def test_prefill_lengths_around_edges(cuda: EmulatedCuda, rows: int, before: int) -> None:
    check(cuda, make_call([(rows, before + rows)], dtype=BFLOAT16))


@pytest.mark.parametrize("num_heads", [1, 3, 16])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 16, 17])
def test_either_side_of_the_row_limit_of_decode(cuda: EmulatedCuda, rows: int, num_heads: int) -> None:
    check(cuda, make_call([(rows, 80), (1, 9)], dtype=FLOAT16, num_heads=num_heads, num_kv_heads=1))


@DTYPES
@pytest.mark.parametrize("window", [1, 7, 16, 64, 65, 130, 1000])
def test_sliding_window(cuda: EmulatedCuda, dtype: Any, window: int) -> None:
    check(cuda, make_call(MIXED, dtype=dtype, sliding_window=window))


@pytest.mark.parametrize("num_sms", [1, 3, 132])
def test_split_over_any_number_of_blocks(cuda: EmulatedCuda, num_sms: int) -> None:
    device = EmulatedCuda(cuda.path, num_sms=num_sms)
    check(device, make_call([(1, 500), (1, 3), (2, 130), (1, 64), (1, 700)], dtype=FLOAT16, num_kv_heads=1))


@DTYPES
def test_without_norm(cuda: EmulatedCuda, dtype: Any) -> None:
    check(cuda, make_call(MIXED, dtype=dtype, norm=False))


def test_q_norm_and_k_norm_are_not_mixed_up(cuda: EmulatedCuda) -> None:
    call = make_call([(20, 30), (1, 9)], dtype=FLOAT16)
    attn, pool = check(cuda, call)
    call.tensors["q_norm"], call.tensors["k_norm"] = call.tensors["k_norm"], call.tensors["q_norm"]
    swapped_attn, swapped_pool = check(cuda, call)
    assert not np.array_equal(attn, swapped_attn)
    assert not np.array_equal(pool, swapped_pool)


def test_norm_eps_is_used(cuda: EmulatedCuda) -> None:
    call = make_call([(20, 30), (1, 9)], dtype=FLOAT16)
    call.tensors["qkv"] *= np.float16(1e-2)
    call.attributes["norm_eps"] = 1e-3
    check(cuda, call)


def test_in_place_is_the_same(cuda: EmulatedCuda) -> None:
    call = make_call(MIXED, dtype=BFLOAT16)
    attn, pool = check(cuda, call)
    attn_in_place, pool_in_place = check(cuda, call, in_place=True)
    np.testing.assert_array_equal(attn.view(np.uint16), attn_in_place.view(np.uint16))
    np.testing.assert_array_equal(pool.view(np.uint16), pool_in_place.view(np.uint16))


@pytest.mark.parametrize("seed", range(1, 4))
def test_order_of_warps_and_blocks_does_not_matter(cuda: EmulatedCuda, seed: int) -> None:
    call = make_call(MIXED, dtype=BFLOAT16)
    attn, pool = cuda.paged_attention(**call.tensors, **call.attributes)
    device = EmulatedCuda(cuda.path, seed=seed)
    other_attn, other_pool = device.paged_attention(**call.tensors, **call.attributes)
    np.testing.assert_array_equal(attn.view(np.uint16), other_attn.view(np.uint16))
    np.testing.assert_array_equal(pool.view(np.uint16), other_pool.view(np.uint16))


def test_each_sequence_is_what_it_is_alone(cuda: EmulatedCuda) -> None:
    """A cache hit, a fresh prompt and a decoding request in one step (NaN in every padded table entry's block)."""
    together = make_call([(2, 14), (14, 14), (1, 33)], dtype=BFLOAT16)
    attn, _ = check(cuda, together)
    start = together.tensors["query_start"]
    for s in range(3):
        rows = slice(start[s], start[s + 1])
        alone = dict(together.tensors)
        alone |= {name: alone[name][rows] for name in ("qkv", "positions")}
        alone |= {name: alone[name][s : s + 1] for name in ("block_tables", "seq_lens")}
        alone["query_start"] = np.array([0, start[s + 1] - start[s]], np.int32)
        solo, _ = check(cuda, Call(alone, together.attributes))
        bound = ATTN_TOLERANCE[BFLOAT16]
        np.testing.assert_allclose(attn[rows].astype(np.float32), solo.astype(np.float32), rtol=bound, atol=bound)


def test_chunks_of_a_prompt_are_the_whole_prompt(cuda: EmulatedCuda) -> None:
    whole = make_call([(150, 150)], dtype=BFLOAT16, head_dim=128)
    attn, pool = check(cuda, whole)
    pieces, cache, done = [], whole.tensors["kv_cache"], 0
    for count in (3, 61, 64, 1, 21):
        part = dict(whole.tensors, kv_cache=cache)
        part |= {name: part[name][done : done + count] for name in ("qkv", "positions")}
        done += count
        part |= {"seq_lens": np.array([done], np.int32), "query_start": np.array([0, count], np.int32)}
        piece, cache = check(cuda, Call(part, whole.attributes))
        pieces.append(piece)
    np.testing.assert_array_equal(pool.view(np.uint16), cache.view(np.uint16))
    bound = ATTN_TOLERANCE[BFLOAT16]
    np.testing.assert_allclose(
        np.concatenate(pieces).astype(np.float32), attn.astype(np.float32), rtol=bound, atol=bound
    )


def test_only_padding(cuda: EmulatedCuda) -> None:
    check(cuda, make_call([(0, 5), (0, 0)], dtype=FLOAT16, padding_rows=5))


def test_no_rows_at_all_copies_the_pool(cuda: EmulatedCuda) -> None:
    call = make_call([(0, 5), (0, 0)], dtype=FLOAT16)
    _, pool = cuda.paged_attention(**call.tensors, **call.attributes)
    np.testing.assert_array_equal(pool.view(np.uint16), call.tensors["kv_cache"].view(np.uint16))


def test_many_sequences(cuda: EmulatedCuda) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 60, 70)
    check(cuda, make_call([(int(random.integers(0, 4)) if n > 3 else 1, int(n)) for n in lengths], dtype=FLOAT16))
