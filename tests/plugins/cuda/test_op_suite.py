"""The cases that every implementation of the op runs, as far as the CUDA kernels' types and sizes allow."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from gpu_check.op_suite import ATTN_TOLERANCE, POOL_TOLERANCE
from tests.plugins.ops import Sizes, make_call
from tests.plugins.test_paged_attention import CASES, dense
from tests.simt.build import build, missing

from .binding import EmulatedCuda

OUT_OF_RANGE = {
    "more heads than a tile's rows": "at most 16 query heads per KV head",
    "window of all int64": "sliding_window is an int32",
    "negative scale": "scale must be positive",
    "large scores": "half precision cannot hold scores that differ by so much",
}


ON_THE_CPU_ALONE = {case for case in CASES if CASES[case].kv_type == np.int8}


def fitted(sizes: Sizes) -> Sizes:
    """The nearest head_dim and block_size that the kernels have."""
    head_dim = min((64, 128), key=lambda dim: abs(dim - sizes.head_dim))
    block_size = min((16, 32, 64, 128), key=lambda size: abs(size - sizes.block_size))
    return replace(sizes, head_dim=head_dim, block_size=block_size)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
@pytest.mark.parametrize("case", sorted(CASES.keys() - OUT_OF_RANGE - ON_THE_CPU_ALONE))
def test_equals_dense_attention(case: str, dtype: np.dtype) -> None:
    if reason := missing():
        pytest.skip(reason)
    call = make_call(fitted(CASES[case]))
    rounded = {name: call[name].astype(dtype) for name in ("qkv", "q_norm", "k_norm", "kv_cache")}
    given = call.but(**rounded)
    want, want_pool = dense(call.but(**{name: x.astype(np.float32) for name, x in rounded.items()}))
    attn, pool = EmulatedCuda(build()).paged_attention(**given.tensors, **given.attributes)
    bound = ATTN_TOLERANCE[dtype]
    np.testing.assert_allclose(attn.astype(np.float64), want, rtol=bound, atol=bound)
    bound = POOL_TOLERANCE[dtype]
    np.testing.assert_allclose(pool.astype(np.float64), want_pool.astype(np.float64), rtol=bound, atol=1e-4)
