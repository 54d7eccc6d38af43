"""MixtureOfExperts in CUDA over the emulator: against the NumPy reference, what a row's bits depend on, what is refused."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpu_check.cases import BFLOAT16, FLOAT16, Call
from gpu_check.experts import ExpertsCase, check_experts, experts_suite, make_experts_call
from gpu_check.memory import Array, aligned
from qwenrt.plugins.cuda_api import DATA_TYPES, ExpertsArgs, ExpertsShape

from .binding import EmulatedCuda
from .readme import kernels

INVALID_VALUE = 1
ALIGNED = ("x", "gate_up", "down", "y", "workspace")
POINTERS = (*ALIGNED, "router_logits")
TILE_ROWS = 64
PRODUCT_FLOPS = 2 * 16 * 8 * 16
"""Of one mma.sync.m16n8k16."""


def shape(**changes: Any) -> ExpertsShape:
    sizes = {"num_tokens": 300, "num_experts": 128, "top_k": 8, "hidden": 2048, "inner": 768, "norm_topk_prob": 1}
    return ExpertsShape(**{**sizes, "dtype": DATA_TYPES["bfloat16"], **changes})


def bits(y: Array) -> Array:
    return y.view(np.uint16)


def rows_of(call: Call, rows: list[int]) -> Call:
    return Call(call.tensors | {name: call.tensors[name][rows] for name in ("x", "router_logits")}, call.attributes)


@pytest.mark.parametrize("case", experts_suite(), ids=str)
def test_suite(cuda: EmulatedCuda, case: ExpertsCase) -> None:
    check_experts(cuda, case.call())


@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize("top_k", range(1, 9))
def test_top_k(cuda: EmulatedCuda, top_k: int, norm: int) -> None:
    check_experts(cuda, make_experts_call(6, 8, top_k, 32, 24, dtype=FLOAT16, norm=norm))


def test_a_row_has_the_same_bits_whatever_else_is_computed(cuda: EmulatedCuda) -> None:
    call = make_experts_call(100, 3, 2, 200, 72, dtype=BFLOAT16)
    whole = bits(cuda.mixture_of_experts(**call.arguments))
    for rows in ([0], [99, 5], list(range(16)), list(range(20, 90)), list(range(99, -1, -1))):
        np.testing.assert_array_equal(bits(cuda.mixture_of_experts(**rows_of(call, rows).arguments)), whole[rows])


@pytest.mark.parametrize("seed", range(1, 4))
def test_order_of_warps_and_blocks_does_not_matter(cuda: EmulatedCuda, seed: int) -> None:
    call = make_experts_call(90, 5, 3, 72, 136, dtype=BFLOAT16)
    y = cuda.mixture_of_experts(**call.arguments)
    other = EmulatedCuda(cuda.path, seed=seed).mixture_of_experts(**call.arguments)
    np.testing.assert_array_equal(bits(y), bits(other))


def test_among_equal_logits_the_lower_number_goes_first(cuda: EmulatedCuda) -> None:
    call = make_experts_call(50, 40, 6, 16, 8, dtype=FLOAT16)
    logits = np.random.default_rng(1).integers(-1, 2, (50, 40)).astype(np.float16)
    logits[0] = 0
    logits[1] = -0.0
    logits[2, ::2] = -np.inf
    call.tensors["router_logits"] = logits
    check_experts(cuda, call)


@pytest.mark.parametrize("spoil", [np.nan, np.inf, -np.inf], ids=str)
def test_logits_that_are_no_numbers_spoil_their_own_row_alone(cuda: EmulatedCuda, spoil: float) -> None:
    call = make_experts_call(40, 8, 2, 64, 32, dtype=BFLOAT16)
    clean = cuda.mixture_of_experts(**call.arguments)
    call.tensors["router_logits"][1] = spoil
    call.tensors["router_logits"][7, 3] = np.nan
    y = cuda.mixture_of_experts(**call.arguments)
    assert np.isnan(y[[1, 7]].astype(np.float32)).all()
    rest = [row for row in range(40) if row not in (1, 7)]
    np.testing.assert_array_equal(bits(y[rest]), bits(clean[rest]))


def test_a_row_of_x_that_is_no_number_spoils_itself_alone(cuda: EmulatedCuda) -> None:
    """What a padding row of a captured step may hold."""
    call = make_experts_call(40, 4, 2, 64, 32, dtype=FLOAT16)
    clean = cuda.mixture_of_experts(**call.arguments)
    call.tensors["x"][[3, 39]] = np.nan
    y = cuda.mixture_of_experts(**call.arguments)
    assert np.isnan(y[[3, 39]]).all()
    rest = [row for row in range(40) if row not in (3, 39)]
    np.testing.assert_array_equal(bits(y[rest]), bits(clean[rest]))


def test_matrices_of_more_than_two_to_the_31_elements(cuda: EmulatedCuda) -> None:
    """The same call with its experts at the end of 1024: 2^31 elements of gate_up, all but the last of them zeros."""
    experts, hidden, inner = 3, 1024, 1024
    call = make_experts_call(2, experts, 2, hidden, inner, dtype=ml_dtypes.bfloat16)
    y = cuda.mixture_of_experts(**call.arguments)
    far: dict[str, Array] = {name: aligned(call.tensors[name]) for name in ("x",)}
    for name, small in (("gate_up", call.tensors["gate_up"]), ("down", call.tensors["down"])):
        rows = len(small) // experts * 1024
        whole = np.frombuffer(mmap.mmap(-1, rows * small[0].nbytes), small.dtype).reshape(rows, -1)
        whole[-len(small) :] = small
        far[name] = whole
    assert far["gate_up"].size == 2**31
    logits = np.full((2, 1024), -np.inf, ml_dtypes.bfloat16)
    logits[:, -experts:] = call.tensors["router_logits"]
    far |= {"router_logits": aligned(logits), "y": aligned(np.zeros_like(y))}
    far_shape = shape(num_tokens=2, num_experts=1024, top_k=2, hidden=hidden, inner=inner)
    far["workspace"] = aligned(np.zeros(cuda.workspace_size(far_shape), np.uint8))
    pointers = {name: tensor.ctypes.data for name, tensor in far.items()}
    cuda.launch(ExpertsArgs(shape=far_shape, workspace_size=far["workspace"].nbytes, **pointers))
    np.testing.assert_array_equal(bits(far["y"]), bits(y))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": 1025}, "num_experts"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 9, "num_experts": 8}, "top_k"),
        ({"top_k": 33}, "top_k"),
        ({"hidden": 0}, "hidden"),
        ({"hidden": 2052}, "hidden must be a multiple of 8"),
        ({"inner": -8}, "inner"),
        ({"inner": 44}, "inner must be a multiple of 8"),
        ({"dtype": 2}, "dtype"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"num_tokens": (1 << 18) + 1}, "num_tokens"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named_and_refused(cuda: EmulatedCuda, changes: dict[str, Any], named: str) -> None:
    assert named in (cuda.unsupported(shape(**changes)) or "")
    args = ExpertsArgs(shape=shape(**changes), workspace_size=1 << 50, **dict.fromkeys(POINTERS, 4096))
    assert cuda.library.qwenrt_mixture_of_experts(ctypes.byref(args)) == INVALID_VALUE


@pytest.mark.parametrize(
    ("name", "address"), [*((name, 0) for name in POINTERS), *((name, 4096 + 8) for name in ALIGNED)]
)
def test_missing_and_misaligned_pointers_are_refused(cuda: EmulatedCuda, name: str, address: int) -> None:
    args = ExpertsArgs(shape=shape(), workspace_size=1 << 40, **{**dict.fromkeys(POINTERS, 4096), name: address})
    assert cuda.library.qwenrt_mixture_of_experts(ctypes.byref(args)) == INVALID_VALUE


def test_too_small_a_workspace_is_refused(cuda: EmulatedCuda) -> None:
    size = cuda.workspace_size(shape()) - 1
    args = ExpertsArgs(shape=shape(), workspace_size=size, **dict.fromkeys(POINTERS, 4096))
    assert cuda.library.qwenrt_mixture_of_experts(ctypes.byref(args)) == INVALID_VALUE


def test_workspace_is_what_the_header_says_and_never_less_for_more_tokens(cuda: EmulatedCuda) -> None:
    sizes = [cuda.workspace_size(shape(num_tokens=tokens)) for tokens in (0, 1, 2, 299, 300, 4096)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == pytest.approx(2 * 4096 * 8 * (2048 + 768), rel=0.01)


@pytest.mark.parametrize("tokens", [1, 300, 1 << 18])
def test_launches_without_reading_device_memory(cuda: EmulatedCuda, tokens: int) -> None:
    """With pointers that lead nowhere: no grid depends on what tensors hold, so a captured graph can be replayed."""
    step = shape(num_tokens=tokens, num_experts=1024)
    args = ExpertsArgs(shape=step, workspace_size=cuda.workspace_size(step), **dict.fromkeys(POINTERS, 4096))
    cuda.library.simt_dry_run(1)
    try:
        cuda.launch(args)
    finally:
        assert cuda.library.simt_dry_run(0) == 5


def work(cuda: EmulatedCuda, call: Call) -> tuple[int, int, int]:
    """Bytes that cp.async copied, mma.sync instructions, the most shared memory of a block."""
    counts = [ctypes.c_int64() for _ in range(3)]
    cuda.library.simt_work(*map(ctypes.byref, counts))
    cuda.mixture_of_experts(**call.arguments)
    cuda.library.simt_work(*map(ctypes.byref, counts))
    copied, products, shared = (count.value for count in counts)
    return copied, products, shared


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65])
@pytest.mark.parametrize("used", [1, 3])
def test_reads_the_matrices_of_the_experts_that_are_used_once_a_tile_of_rows(
    cuda: EmulatedCuda, tokens: int, used: int
) -> None:
    hidden, inner = 192, 128
    call = make_experts_call(tokens, 24, used, hidden, inner, dtype=BFLOAT16, used=used)
    copied, products, shared = work(cuda, call)
    tiles = -(-tokens // TILE_ROWS)
    rows = tokens * (hidden * (inner // 64) + inner * -(-hidden // 128))  # once for every tile of columns
    assert copied == 2 * used * (3 * inner * hidden * tiles + rows)
    columns = 2 * inner * hidden + inner * 256
    assert products * PRODUCT_FLOPS == used * 2 * -(-tokens // 16) * 16 * columns
    name = "experts_few" if tokens <= 16 else "experts"
    (row,) = [kernel for kernel in kernels() if kernel.name == name]
    assert shared == row.shared
