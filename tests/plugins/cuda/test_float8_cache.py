"""K and V stored as float8 e4m3 with a scale per head: the pool holds the rounded quotients, and attention reads them exactly."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qwenrt.plugins.reference import paged_attention
from tests.simt.build import build, missing

from .binding import EmulatedCuda
from .cases import Array, Call, make_call
from .test_paged_attention import ATTN_TOLERANCE, DTYPES, MIXED

FLOAT8 = ml_dtypes.float8_e4m3fn
K_SCALES, V_SCALES = np.array([0.25, 0.07], np.float32), np.array([0.1, 2.0], np.float32)


@pytest.fixture(scope="module")
def cuda() -> EmulatedCuda:
    if reason := missing():
        pytest.skip(reason)
    return EmulatedCuda(build())


def numbers(pool: Array) -> Array:
    """[num_blocks, 2, Hkv, block_size, D] as float32, scales applied."""
    scales = np.stack([K_SCALES, V_SCALES])[:, : pool.shape[2], None, None]
    return pool.astype(np.float32) * scales


def reference(call: Call, **changes: Array) -> tuple[Array, Array]:
    """In float32, over the numbers that the call's pool stands for."""
    tensors = {name: x if x.dtype == np.int32 else x.astype(np.float32) for name, x in call.tensors.items()}
    return paged_attention(**{**tensors, "kv_cache": numbers(call.tensors["kv_cache"]), **changes}, **call.attributes)


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("norm", [True, False])
def test_pool_holds_the_rounded_quotients(cuda: EmulatedCuda, dtype: Any, head_dim: int, norm: bool) -> None:
    call = make_call(MIXED, dtype=dtype, kv_dtype=FLOAT8, head_dim=head_dim, norm=norm, padding_rows=2)
    _, pool = cuda.paged_attention(**call.tensors, **call.attributes, k_scale=K_SCALES, v_scale=V_SCALES)
    _, exact = reference(call)
    rounded = (exact / numbers(np.ones_like(pool))).astype(FLOAT8)
    np.testing.assert_allclose(pool.astype(np.float32), rounded.astype(np.float32), rtol=0.13, atol=2**-9)
    assert np.mean(pool.view(np.uint8) != rounded.view(np.uint8)) < 1e-3


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("window", [-1, 50])
def test_attention_over_what_is_stored(
    cuda: EmulatedCuda, dtype: Any, head_dim: int, block_size: int, window: int
) -> None:
    call = make_call(
        MIXED, dtype=dtype, kv_dtype=FLOAT8, head_dim=head_dim, block_size=block_size, norm=False, sliding_window=window
    )
    attn, pool = cuda.paged_attention(**call.tensors, **call.attributes, k_scale=K_SCALES, v_scale=V_SCALES)
    expected, _ = reference(call, qkv=stored_rows(call, numbers(pool)))
    bound = ATTN_TOLERANCE[np.dtype(dtype)]
    np.testing.assert_allclose(attn.astype(np.float32), expected, rtol=bound, atol=bound)


def stored_rows(call: Call, pool: Array) -> Array:
    """qkv with k and v such that the op, without norm, writes just the numbers that lie in the pool."""
    tensors, num_heads, head_dim = call.tensors, call.attributes["num_heads"], call.attributes["head_dim"]
    qkv = tensors["qkv"].astype(np.float32).reshape(len(tensors["qkv"]), -1, head_dim)
    num_kv_heads, block_size = pool.shape[2], pool.shape[3]
    for s in range(len(tensors["seq_lens"])):
        for row in range(tensors["query_start"][s], tensors["query_start"][s + 1]):
            position = tensors["positions"][row]
            key, value = pool[tensors["block_tables"][s, position // block_size], :, :, position % block_size]
            cos, sin = np.split(tensors["rope"][position], 2)
            first, second = np.split(key, 2, axis=-1)
            qkv[row, num_heads : num_heads + num_kv_heads] = np.concatenate(
                [first * cos + second * sin, second * cos - first * sin], axis=-1
            )
            qkv[row, num_heads + num_kv_heads :] = value
    return qkv.reshape(tensors["qkv"].shape)


def test_without_scales_they_are_one(cuda: EmulatedCuda) -> None:
    call = make_call([(20, 30), (1, 9)], dtype=np.float16, kv_dtype=FLOAT8)
    ones = np.ones(2, np.float32)
    attn, pool = cuda.paged_attention(**call.tensors, **call.attributes)
    scaled_attn, scaled_pool = cuda.paged_attention(**call.tensors, **call.attributes, k_scale=ones, v_scale=ones)
    np.testing.assert_array_equal(attn.view(np.uint16), scaled_attn.view(np.uint16))
    np.testing.assert_array_equal(pool.view(np.uint8), scaled_pool.view(np.uint8))


def test_numbers_too_large_are_the_largest(cuda: EmulatedCuda) -> None:
    call = make_call([(20, 20)], dtype=np.float16, kv_dtype=FLOAT8)
    tiny = np.full(2, 1e-5, np.float32)
    attn, pool = cuda.paged_attention(**call.tensors, **call.attributes, k_scale=tiny, v_scale=tiny)
    written = pool.astype(np.float32)[np.isfinite(pool.astype(np.float32))]
    assert np.abs(written).max() == 448
    assert np.isfinite(attn.astype(np.float32)).all()
