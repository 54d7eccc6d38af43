"""The C API around the kernels: what it refuses, what it promises about grids, workspace and large pools."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpu_check.cases import make_call
from gpu_check.memory import aligned
from gpu_check.op import make_shape
from qwenrt.plugins.cuda_api import Args, Shape
from tests.simt.build import build, missing

from .binding import EmulatedCuda

INVALID_VALUE = 1
OPTIONAL = ("stream", "k_scale", "v_scale")
POINTERS = [name for name, kind in Args._fields_ if kind is ctypes.c_void_p and name not in OPTIONAL]


INDICES = ("positions", "block_tables", "seq_lens", "query_start")


@pytest.fixture(scope="module")
def cuda() -> EmulatedCuda:
    if reason := missing():
        pytest.skip(reason)
    return EmulatedCuda(build())


def shape(**changes: Any) -> Shape:
    sizes = {"num_tokens": 300, "num_seqs": 8, "max_blocks": 64, "num_blocks": 512, "max_positions": 1024}
    heads = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "block_size": 16, "sliding_window": -1}
    return Shape(**{**sizes, **heads, "scale": 0.1, "norm_eps": 1e-6, "dtype": 1, "kv_dtype": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_heads": 15}, "num_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"num_heads": 17, "num_kv_heads": 1}, "num_heads / num_kv_heads"),
        ({"head_dim": 96}, "head_dim"),
        ({"block_size": 8}, "block_size"),
        ({"block_size": 48}, "block_size"),
        ({"block_size": 256}, "block_size"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": -2}, "sliding_window"),
        ({"scale": 0.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": float("inf")}, "scale"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"dtype": 3}, "dtype"),
        ({"dtype": 2}, "dtype"),
        ({"kv_dtype": 0}, "kv_dtype"),
        ({"kv_dtype": 3}, "kv_dtype"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"max_blocks": 1 << 27}, "max_blocks"),
        ({"num_seqs": 1 << 20, "max_blocks": 1 << 20}, "num_seqs"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named_and_refused(cuda: EmulatedCuda, changes: dict[str, Any], named: str) -> None:
    assert named in (cuda.unsupported(shape(**changes)) or "")
    args = Args(shape=shape(**changes), workspace_size=1 << 40, **dict.fromkeys(POINTERS, 4096))
    assert cuda.library.qwenrt_paged_attention(ctypes.byref(args)) == INVALID_VALUE


@pytest.mark.parametrize(
    "changes", [{}, {"num_heads": 14, "num_kv_heads": 2}, {"kv_dtype": 2}, {"num_tokens": 0}], ids=str
)
def test_what_is_supported(cuda: EmulatedCuda, changes: dict[str, Any]) -> None:
    assert cuda.unsupported(shape(**changes)) is None


# An int32 tensor may begin anywhere.
@pytest.mark.parametrize(
    ("name", "address"),
    [(name, 0) for name in POINTERS] + [(name, 4096 + 8) for name in POINTERS if name not in INDICES],
)
def test_missing_and_misaligned_pointers_are_refused(cuda: EmulatedCuda, name: str, address: int) -> None:
    pointers = {**dict.fromkeys(POINTERS, 4096), name: address}
    args = Args(shape=shape(), workspace_size=1 << 40, **pointers)
    cuda.library.simt_dry_run(1)
    try:
        assert cuda.library.qwenrt_paged_attention(ctypes.byref(args)) == INVALID_VALUE
    finally:
        assert cuda.library.simt_dry_run(0) == 0


def test_too_small_a_workspace_is_refused(cuda: EmulatedCuda) -> None:
    args = Args(shape=shape(), workspace_size=cuda.workspace_size(shape()) - 1, **dict.fromkeys(POINTERS, 4096))
    assert cuda.library.qwenrt_paged_attention(ctypes.byref(args)) == INVALID_VALUE


def test_scales_without_a_float8_pool_are_refused(cuda: EmulatedCuda) -> None:
    args = Args(shape=shape(), workspace_size=1 << 40, **dict.fromkeys([*POINTERS, "k_scale"], 4096))
    assert cuda.library.qwenrt_paged_attention(ctypes.byref(args)) == INVALID_VALUE


def test_workspace_for_the_largest_shape_serves_all(cuda: EmulatedCuda) -> None:
    largest = cuda.workspace_size(shape())
    for changes in ({"num_seqs": 0}, {"num_seqs": 7}, {"num_tokens": 1}, {"max_blocks": 1}, {"head_dim": 64}):
        assert cuda.workspace_size(shape(**changes)) <= largest


@pytest.mark.parametrize("in_place", [True, False])
def test_launches_without_reading_device_memory(cuda: EmulatedCuda, in_place: bool) -> None:
    """With pointers that lead nowhere: so no grid depends on what tensors hold, and a captured graph can be replayed."""
    pointers = {**dict.fromkeys(POINTERS, 4096), "kv_cache_out": 4096 if in_place else 8192}
    args = Args(shape=shape(), workspace_size=cuda.workspace_size(shape()), **pointers)
    cuda.library.simt_dry_run(1)
    try:
        cuda.launch(args)
    finally:
        assert cuda.library.simt_dry_run(0) == 4


def test_nothing_is_launched_where_there_are_no_rows(cuda: EmulatedCuda) -> None:
    args = Args(shape=shape(num_tokens=0), **dict.fromkeys(POINTERS, 4096))
    cuda.library.simt_dry_run(1)
    cuda.launch(args)
    assert cuda.library.simt_dry_run(0) == 0


def test_a_wrong_block_id_reaches_no_memory(cuda: EmulatedCuda) -> None:
    call = make_call([(1, 40), (20, 20), (1, 17)], dtype=np.float16)
    call.tensors["block_tables"][:2] = [[2**31 - 1], [-1]]
    attn, pool = cuda.paged_attention(**call.tensors, **call.attributes)
    changed = (pool.view(np.uint16) != call.tensors["kv_cache"].view(np.uint16)).any(axis=(1, 2, 3, 4))
    assert list(np.flatnonzero(changed)) == [call.tensors["block_tables"][2, 1]]
    assert np.isfinite(attn[-1].astype(np.float32)).all()


def test_a_wrong_position_reaches_no_memory(cuda: EmulatedCuda) -> None:
    call = make_call([(4, 40)], dtype=np.float16)
    call.tensors["positions"][:] = [-1, 2**31 - 1, 48, 10**6]
    _, pool = cuda.paged_attention(**call.tensors, **call.attributes)
    np.testing.assert_array_equal(pool.view(np.uint16), call.tensors["kv_cache"].view(np.uint16))


@pytest.mark.parametrize("sequence", [(1, 90), (40, 90)], ids=["decode", "prefill"])
def test_a_pool_of_more_than_two_to_the_31_elements(cuda: EmulatedCuda, sequence: tuple[int, int]) -> None:
    """65536 blocks of 2 x 8 heads x 16 x 128 are 2^31 elements: the same call with its blocks at the end of such a pool."""
    call = make_call([sequence], dtype=ml_dtypes.bfloat16, num_heads=8, num_kv_heads=8, head_dim=128)
    attn, pool = cuda.paged_attention(**call.tensors, **call.attributes)
    small = call.tensors["kv_cache"]
    shift = 65536 + 8 - len(small)
    huge = np.frombuffer(mmap.mmap(-1, (65536 + 8) * small[0].nbytes), small.dtype).reshape(65536 + 8, *small.shape[1:])
    huge[shift:] = small
    tensors = {name: aligned(tensor) for name, tensor in call.tensors.items() if name != "kv_cache"}
    tensors["block_tables"] += np.int32(shift)
    far_shape = make_shape(call.tensors["qkv"], huge, tensors["block_tables"], tensors["rope"], **call.attributes)
    far_attn = aligned(np.zeros_like(attn))
    workspace = aligned(np.zeros(cuda.workspace_size(far_shape), np.uint8))
    tensors |= {"kv_cache": huge, "kv_cache_out": huge, "attn": far_attn, "workspace": workspace}
    pointers = {name: tensor.ctypes.data for name, tensor in tensors.items()}
    cuda.launch(Args(shape=far_shape, workspace_size=workspace.nbytes, **pointers))
    np.testing.assert_array_equal(far_attn.view(np.uint16), attn.view(np.uint16))
    np.testing.assert_array_equal(huge[shift:].view(np.uint16), pool.view(np.uint16))
    assert not huge[0].view(np.uint16).any()
