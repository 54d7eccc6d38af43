"""What the attention kernels copy and multiply, counted by the emulator: the formulas of plugins/cuda/README.md."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from gpu_check.cases import BFLOAT16, FLOAT8, FLOAT16, make_call
from qwenrt.plugins.cuda_api import DATA_TYPES, Args, Shape

from .binding import EmulatedCuda
from .readme import Kernel, kernels

TILE = 64
PREFILL_ROWS = 128
PRODUCT_FLOPS = 2 * 16 * 8 * 16
"""Of one mma.sync.m16n8k16."""


def work(cuda: EmulatedCuda, sequences: list[tuple[int, int]], **options: Any) -> tuple[int, int, int]:
    """Bytes that cp.async copied, mma.sync instructions, the most shared memory of a block."""
    call = make_call(sequences, **options)
    counts = [ctypes.c_int64() for _ in range(3)]
    cuda.library.simt_work(*map(ctypes.byref, counts))
    cuda.paged_attention(**call.tensors, **call.attributes)
    cuda.library.simt_work(*map(ctypes.byref, counts))
    copied, products, shared = (count.value for count in counts)
    return copied, products, shared


@pytest.mark.parametrize("kv_dtype", [BFLOAT16, FLOAT8], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_decode_reads_k_and_v_once_whatever_the_group(
    cuda: EmulatedCuda, group: int, head_dim: int, kv_dtype: Any
) -> None:
    lengths, num_kv_heads = (300, 64, 1, 129), 2
    copied, products, _ = work(
        cuda,
        [(1, length) for length in lengths],
        dtype=BFLOAT16,
        kv_dtype=kv_dtype,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    assert copied == sum(2 * num_kv_heads * length * head_dim * kv_dtype.itemsize for length in lengths)
    tiles = sum(-(-length // TILE) for length in lengths)
    assert products * PRODUCT_FLOPS == num_kv_heads * tiles * TILE * 64 * head_dim


def test_decode_with_a_window_reads_no_more_than_it(cuda: EmulatedCuda) -> None:
    copied, _, _ = work(cuda, [(1, 300)], dtype=FLOAT16, sliding_window=70)
    assert copied == 2 * 2 * 70 * 64 * 2


@pytest.mark.parametrize("kv_dtype", [FLOAT16, FLOAT8], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2])
def test_prefill_reads_k_and_v_once_for_every_tile_of_128_rows(
    cuda: EmulatedCuda, group: int, head_dim: int, kv_dtype: Any
) -> None:
    tokens, num_kv_heads = 300, 2
    copied, products, _ = work(
        cuda,
        [(tokens, tokens)],
        dtype=FLOAT16,
        kv_dtype=kv_dtype,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    step = PREFILL_ROWS // group
    seen = [min(end, tokens) for end in range(step, tokens + step, step)]
    query = tokens * group * num_kv_heads * head_dim * 2
    assert copied == query + num_kv_heads * sum(2 * end * head_dim * kv_dtype.itemsize for end in seen)
    tiles = sum(-(-end // TILE) for end in seen)
    assert products * PRODUCT_FLOPS == num_kv_heads * tiles * 4 * PREFILL_ROWS * TILE * head_dim


@pytest.mark.parametrize("kernel", [kernel for kernel in kernels() if kernel.shared and kernel.head_dim], ids=str)
def test_a_block_asks_for_the_shared_memory_that_the_readme_says(cuda: EmulatedCuda, kernel: Kernel) -> None:
    sizes = {"num_tokens": 99, "num_seqs": 1, "max_blocks": 8, "num_blocks": 8, "max_positions": 16, "block_size": 16}
    heads = {"num_heads": 1, "num_kv_heads": 1, "head_dim": kernel.head_dim, "sliding_window": -1, "scale": 1.0}
    shape = Shape(**sizes, **heads, dtype=DATA_TYPES["float16"], kv_dtype=DATA_TYPES[kernel.pool])
    pointers = [
        name for name, kind in Args._fields_ if kind is ctypes.c_void_p and "scale" not in name and name != "stream"
    ]
    args = Args(shape=shape, workspace_size=cuda.workspace_size(shape), **dict.fromkeys(pointers, 4096))
    counts = [ctypes.c_int64() for _ in range(3)]
    cuda.library.simt_work(*map(ctypes.byref, counts))
    cuda.library.simt_dry_run(1)
    try:
        cuda.launch(args, f"qwenrt_{kernel.name}_attention")
    finally:
        cuda.library.simt_dry_run(0)
    cuda.library.simt_work(*map(ctypes.byref, counts))
    assert counts[2].value == kernel.shared
