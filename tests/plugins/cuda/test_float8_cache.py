"""K and V stored as float8 e4m3 with a scale per head: the pool holds the rounded quotients. Attention over it: the op suite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_check.cases import FLOAT8, MIXED, make_call
from gpu_check.op_suite import K_SCALES, V_SCALES, float8_numbers, reference_of_float8
from tests.simt.build import build, missing

from .binding import EmulatedCuda
from .test_paged_attention import DTYPES


@pytest.fixture(scope="module")
def cuda() -> EmulatedCuda:
    if reason := missing():
        pytest.skip(reason)
    return EmulatedCuda(build())


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("norm", [True, False])
def test_pool_holds_the_rounded_quotients(cuda: EmulatedCuda, dtype: Any, head_dim: int, norm: bool) -> None:
    call = make_call(MIXED, dtype=dtype, kv_dtype=FLOAT8, head_dim=head_dim, norm=norm, padding_rows=2)
    _, pool = cuda.paged_attention(**call.tensors, **call.attributes, k_scale=K_SCALES, v_scale=V_SCALES)
    _, exact = reference_of_float8(call)
    rounded = (exact / float8_numbers(np.ones_like(pool))).astype(FLOAT8)
    np.testing.assert_allclose(pool.astype(np.float32), rounded.astype(np.float32), rtol=0.13, atol=2**-9)
    assert np.mean(pool.view(np.uint8) != rounded.view(np.uint8)) < 1e-3


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
