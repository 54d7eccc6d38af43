"""The CUDA kernels, run by the emulator, give what the NumPy reference gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_check.cases import BFLOAT16, FLOAT8, FLOAT16, MIXED, Call, Case, make_call, suite
from gpu_check.memory import Array
from gpu_check.op_suite import ATTN_TOLERANCE, check, check_float8

from .binding import EmulatedCuda

DTYPES = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)


@pytest.mark.parametrize("case", suite(), ids=str)
def test_suite(cuda: EmulatedCuda, case: Case) -> None:
    call = case.call()
    if call.tensors["kv_cache"].dtype == FLOAT8:
        check_float8(cuda, call)
    else:
        check(cuda, call)


@pytest.mark.parametrize("num_sms", [1, 3, 132])
def test_split_over_any_number_of_blocks(cuda: EmulatedCuda, num_sms: int) -> None:
    device = EmulatedCuda(cuda.path, num_sms=num_sms)
    check(device, make_call([(1, 500), (1, 3), (2, 130), (1, 64), (1, 700)], dtype=FLOAT16, num_kv_heads=1))


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


def part_of(call: Call, sequence: int, first: int, count: int, pool: Array) -> Call:
    """A step of its own for `count` rows of a sequence from its row `first` on, over `pool`."""
    tensors, row = dict(call.tensors), call.tensors["query_start"][sequence] + first
    tensors |= {name: tensors[name][row : row + count] for name in ("qkv", "positions")}
    tensors["block_tables"] = tensors["block_tables"][sequence : sequence + 1]
    tensors["seq_lens"] = tensors["positions"][-1:] + 1
    tensors |= {"query_start": np.array([0, count], np.int32), "kv_cache": pool}
    return Call(tensors, call.attributes)


@pytest.mark.parametrize("kv_dtype", [None, FLOAT8], ids=["16 bits", "float8"])
def test_bits_of_a_prompt_depend_neither_on_the_batch_nor_on_its_cuts(cuda: EmulatedCuda, kv_dtype: Any) -> None:
    """As long as every piece is one for the prefill kernel: of more than 8 rows, where 2 heads share a KV head."""
    call = make_call([(1, 300), (150, 210), (2, 40)], dtype=BFLOAT16, kv_dtype=kv_dtype, num_heads=4, head_dim=128)
    together, _ = cuda.paged_attention(**call.arguments)
    rows = together[1:151].view(np.uint16)
    for cuts in ((150,), (9, 61, 64, 16)):
        first, found, written = 0, [], call.tensors["kv_cache"]
        for count in cuts:
            attn, written = cuda.paged_attention(**part_of(call, 1, first, count, written).arguments)
            found.append(attn.view(np.uint16))
            first += count
        np.testing.assert_array_equal(np.concatenate(found), rows)


def test_a_decoding_sequence_has_the_same_bits_in_the_same_batch_and_nearly_the_same_in_others(
    cuda: EmulatedCuda,
) -> None:
    """Where its context is split follows from the other sequences' lengths: what plugins/README.md says of CUDA."""
    call = make_call([(1, 700), (1, 333), (1, 64), (1, 512)], dtype=BFLOAT16)
    together, _ = cuda.paged_attention(**call.arguments)
    again, _ = cuda.paged_attention(**call.arguments)
    np.testing.assert_array_equal(together.view(np.uint16), again.view(np.uint16))
    bound = ATTN_TOLERANCE[BFLOAT16]
    for sequence in range(4):
        alone, _ = cuda.paged_attention(**part_of(call, sequence, 0, 1, call.tensors["kv_cache"]).arguments)
        np.testing.assert_allclose(
            alone.astype(np.float32), together[sequence : sequence + 1].astype(np.float32), rtol=bound, atol=bound
        )


@DTYPES
@pytest.mark.parametrize("kv_dtype", [None, FLOAT8], ids=["16 bits", "float8"])
def test_no_rows_at_all_copies_the_pool(cuda: EmulatedCuda, dtype: Any, kv_dtype: Any) -> None:
    call = make_call([(0, 5), (0, 0)], dtype=dtype, kv_dtype=kv_dtype)
    _, pool = cuda.paged_attention(**call.tensors, **call.attributes)
    assert pool.tobytes() == call.tensors["kv_cache"].tobytes()
