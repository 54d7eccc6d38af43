"""The op suite: the kernels against the NumPy reference. As a program, the part of gpu_check that runs it on the GPU.

python -m gpu_check.op_suite LIBRARY [--small] [--host]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from qwenrt.plugins.reference import paged_attention
from setup.nvidia import cuda_home

from .cases import BFLOAT16, FLOAT8, FLOAT16, Call, Case, suite
from .experts import ExpertsCase, check_experts, experts_suite
from .memory import Array, DeviceMemory, HostMemory
from .op import CudaOp, LaunchError
from .parts import Row, emit
from .runtime import CudaRuntime

# Of attn, absolute and relative: q, the weights and the result are each rounded to the type once. Of the pool: one rounding.
ATTN_TOLERANCE = {FLOAT16: 3e-3, BFLOAT16: 2e-2}
POOL_TOLERANCE = {FLOAT16: 2e-3, BFLOAT16: 1.6e-2}
K_SCALES, V_SCALES = np.array([0.25, 0.07], np.float32), np.array([0.1, 2.0], np.float32)
SMALL = (
    "blocks of 32,",
    "14 heads over 2",
    "window of 65",
    "a long sequence",
    "float8 pool, head_dim 128, blocks of 16",
    "experts, eight of 128",
    "experts, several tiles",
)
"""What the cases of the small suite have in their names: each kernel and each kind of tile once or twice."""


def check(op: CudaOp, call: Call, **options: Any) -> tuple[Array, Array]:
    """Runs the call, compares it with the reference, and returns what the kernels gave: attn and the pool.

    Raises AssertionError where they differ by more than rounding.
    """
    attn, pool = op.paged_attention(**call.arguments, **options)
    # In float32 on the same rounded inputs; K and V are rounded as they go to the pool.
    exact = {name: call.tensors[name].astype(np.float32) for name in ("qkv", "q_norm", "k_norm")}
    expected_attn, expected_pool = paged_attention(**call.arguments | exact)
    end = call.tensors["query_start"][-1]
    _compare_attn(attn[:end], expected_attn[:end])
    assert not attn[end:].astype(np.float32).any(), "padding rows of attn are not 0"
    bound = POOL_TOLERANCE[attn.dtype]
    np.testing.assert_allclose(pool.astype(np.float32), expected_pool.astype(np.float32), rtol=bound, atol=1e-4)
    untouched = expected_pool.view(np.uint16) == call.tensors["kv_cache"].view(np.uint16)
    np.testing.assert_array_equal(pool.view(np.uint16)[untouched], expected_pool.view(np.uint16)[untouched])
    return attn, pool


def check_float8(op: CudaOp, call: Call) -> None:
    """The same for a call without norms whose pool is float8, with a scale per KV head.

    K and V lose more by being stored than the kernels may be wrong by; so what was stored is held against the rounded quotients,
    and attn against a reference whose k and v are the numbers that were stored.
    """
    attn, pool = op.paged_attention(**call.arguments, k_scale=K_SCALES, v_scale=V_SCALES)
    _, exact = reference_of_float8(call)
    rounded = (exact / float8_numbers(np.ones_like(pool))).astype(FLOAT8)
    np.testing.assert_allclose(pool.astype(np.float32), rounded.astype(np.float32), rtol=0.13, atol=2**-9)
    assert np.mean(pool.view(np.uint8) != rounded.view(np.uint8)) < 1e-3, "too many numbers are rounded otherwise"
    expected, _ = reference_of_float8(call, qkv=_stored_rows(call, float8_numbers(pool)))
    _compare_attn(attn, expected)


def float8_numbers(pool: Array) -> Array:
    """What a float8 pool [num_blocks, 2, Hkv, block_size, D] stands for under the scales above, in float32."""
    scales = np.stack([K_SCALES, V_SCALES])[:, : pool.shape[2], None, None]
    numbers: Array = pool.astype(np.float32) * scales
    return numbers


def reference_of_float8(call: Call, **changes: Array) -> tuple[Array, Array]:
    """The reference in float32, over the numbers that the call's pool stands for."""
    exact = {name: x.astype(np.float32) for name, x in call.tensors.items() if x.dtype != np.int32}
    return paged_attention(**call.arguments | exact | {"kv_cache": float8_numbers(call.tensors["kv_cache"])} | changes)


def _compare_attn(attn: Array, expected: Array) -> None:
    bound = ATTN_TOLERANCE[attn.dtype]
    np.testing.assert_allclose(attn.astype(np.float32), expected, rtol=bound, atol=bound)


def _stored_rows(call: Call, pool: Array) -> Array:
    """qkv with k and v such that the op, without norm, writes just the numbers that lie in `pool`."""
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
    rows: Array = qkv.reshape(tensors["qkv"].shape)
    return rows


def whole_suite(small: bool = False) -> list[Case | ExpertsCase]:
    """The cases of both ops; small: few of them, for compute-sanitizer."""
    cases: list[Case | ExpertsCase] = [*suite(), *experts_suite()]
    return [case for case in cases if not small or any(part in case.name for part in SMALL)]


def run_case(op: CudaOp, case: Case | ExpertsCase) -> Row:
    """Whether the case passes and, where it does not, what was wrong. Raises CudaError if the GPU has failed."""
    call = case.call()
    row: Row = {"case": case.name, "passed": True}
    try:
        if isinstance(case, ExpertsCase):
            check_experts(op, call)
        elif call.tensors["kv_cache"].dtype == FLOAT8:
            check_float8(op, call)
        else:
            check(op, call)
    except (AssertionError, LaunchError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        row |= {"passed": False, "error": " ".join(lines[:5])}
    return row


def main() -> int:
    """The command line; exits with 1 if a case fails."""
    parser = argparse.ArgumentParser(prog="gpu_check.op_suite")
    parser.add_argument("library", type=Path)
    parser.add_argument("--small", action="store_true", help="few cases, for compute-sanitizer")
    parser.add_argument("--host", action="store_true", help="the library is a build for the host: tests/simt")
    options = parser.parse_args()
    op = CudaOp(options.library, HostMemory() if options.host else DeviceMemory(CudaRuntime(cuda_home())))
    passed = True
    for case in whole_suite(options.small):
        row = run_case(op, case)
        passed = passed and row["passed"]
        emit(row)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
