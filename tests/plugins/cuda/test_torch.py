"""The ops on CUDA tensors of PyTorch: what reaches the kernels, over the emulator; all of it where there is a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_check.cases import BFLOAT16, FLOAT8, FLOAT16, MIXED, Call, make_call
from gpu_check.experts import TOLERANCE, make_experts_call
from gpu_check.memory import Array, aligned
from gpu_check.op_suite import ATTN_TOLERANCE
from qwenrt.plugins import ConfigError, DeviceError, reference, torch_cuda, torch_experts, torch_op
from qwenrt.plugins.cuda_api import CudaKernels
from qwenrt.plugins.schema import MIXTURE_OF_EXPERTS, PAGED_ATTENTION

from .binding import EmulatedCuda
from .test_paged_attention import DTYPES

TORCH_TYPES = {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16, FLOAT8: torch.float8_e4m3fn}
NO_INTEGERS = [None] * (len(MIXTURE_OF_EXPERTS.inputs) - 4)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU for PyTorch here")


def tensor(array: Array) -> torch.Tensor:
    """The same memory as a tensor."""
    if array.dtype not in TORCH_TYPES:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"u{array.itemsize}")).view(TORCH_TYPES[array.dtype])


def bytes_of(value: torch.Tensor) -> Array:
    return value.cpu().view(torch.uint8).numpy()


def inputs_of(call: Call) -> dict[str, torch.Tensor]:
    return {value.name: tensor(aligned(call.tensors[value.name])) for value in PAGED_ATTENTION.inputs}


@pytest.mark.parametrize("kv_dtype", [None, FLOAT8], ids=str)
@DTYPES
def test_launch_gives_the_kernels_what_the_binding_of_their_own_tests_gives(
    cuda: EmulatedCuda,
    dtype: Any,
    kv_dtype: Any,
) -> None:
    call = make_call(MIXED, dtype=dtype, kv_dtype=kv_dtype, padding_rows=2, sliding_window=50)
    inputs = inputs_of(call)
    attn = torch_cuda.launch(cuda, inputs, call.attributes, 0)
    expected_attn, expected_pool = cuda.paged_attention(**call.tensors, **call.attributes)
    np.testing.assert_array_equal(bytes_of(attn), expected_attn.view(np.uint8))
    np.testing.assert_array_equal(bytes_of(inputs["kv_cache"]), expected_pool.view(np.uint8))


def test_launch_without_norms(cuda: EmulatedCuda) -> None:
    call = make_call([(3, 20), (1, 5)], dtype=FLOAT16, norm=False)
    expected, _ = cuda.paged_attention(**call.tensors, **call.attributes)
    np.testing.assert_array_equal(
        bytes_of(torch_cuda.launch(cuda, inputs_of(call), call.attributes, 0)), expected.view(np.uint8)
    )


def test_sizes_without_a_kernel_are_refused_in_the_kernels_words(cuda: EmulatedCuda) -> None:
    call = make_call([(1, 5)], dtype=FLOAT16)
    with pytest.raises(ConfigError, match=r"PagedAttention on CUDA: .*block_size must be"):
        torch_cuda.launch(cuda, inputs_of(call), call.attributes | {"block_size": 24}, 0)


def test_a_launch_that_cuda_refuses_is_a_device_error(cuda: EmulatedCuda) -> None:
    call = make_call([(1, 5)], dtype=FLOAT16)
    inputs = inputs_of(call)
    shifted = torch.empty(inputs["qkv"].numel() + 1, dtype=torch.float16)[1:].view_as(inputs["qkv"])
    with pytest.raises(DeviceError, match="PagedAttention could not be launched: cudaError_t 1"):
        torch_cuda.launch(CudaKernels(cuda.path), {**inputs, "qkv": shifted}, call.attributes, 0)


def experts_tensors(call: Call) -> list[torch.Tensor]:
    return [tensor(aligned(call.tensors[value.name])) for value in MIXTURE_OF_EXPERTS.inputs[:4]]


@DTYPES
def test_experts_of_one_type_go_to_the_kernels(
    cuda: EmulatedCuda,
    monkeypatch: pytest.MonkeyPatch,
    dtype: Any,
) -> None:
    monkeypatch.setattr(torch_cuda, "kernels", lambda: cuda)
    call = make_experts_call(20, 6, 2, 40, 24, dtype=dtype)
    y = torch_experts._by_kernels(*experts_tensors(call), 2, 1, 0)
    assert y is not None
    np.testing.assert_array_equal(bytes_of(y), cuda.mixture_of_experts(**call.arguments).view(np.uint8))


def test_experts_that_the_kernels_have_not_are_left_to_pytorch(
    cuda: EmulatedCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_cuda, "kernels", lambda: cuda)
    odd = experts_tensors(make_experts_call(3, 4, 2, 12, 8, dtype=FLOAT16))
    assert torch_experts._by_kernels(*odd, 2, 1, 0) is None
    x, *rest = experts_tensors(make_experts_call(3, 4, 2, 16, 8, dtype=FLOAT16))
    assert torch_experts._by_kernels(x.float(), *rest, 2, 1, 0) is None


@DTYPES
def test_pytorch_computes_experts_of_16_bits_in_float32(dtype: Any) -> None:
    call = make_experts_call(20, 6, 3, 40, 24, dtype=dtype)
    y = torch_experts.mixture_of_experts(*experts_tensors(call), *NO_INTEGERS, 3, 1)
    assert y.dtype == TORCH_TYPES[np.dtype(dtype)]
    bound = float(torch.finfo(y.dtype).eps)  # y alone is rounded
    np.testing.assert_allclose(y.float(), reference.mixture_of_experts(**call.arguments), rtol=bound, atol=1e-5)


@NEEDS_GPU
@DTYPES
def test_experts_on_a_gpu(dtype: Any) -> None:
    call = make_experts_call(70, 16, 4, 264, 136, dtype=dtype)
    tensors = [one.cuda() for one in experts_tensors(call)]
    y = torch_experts.mixture_of_experts(*tensors, *NO_INTEGERS, 4, 1)
    bound = TOLERANCE[np.dtype(dtype)]
    np.testing.assert_allclose(y.float().cpu(), reference.mixture_of_experts(**call.arguments), rtol=bound, atol=bound)


def test_the_op_has_kernels_for_cpu_and_cuda() -> None:
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("qwenrt::paged_attention", key)


@pytest.fixture
def stream(cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """PyTorch's idea of device and stream, and the library, replaced; gives (device, stream) of each launch."""
    launches: list[Any] = []

    def launch(library: Any, inputs: Any, values: Any, stream: int) -> torch.Tensor:
        assert library is cuda
        launches.append((entered[-1], stream))
        return real(library, inputs, values, 0)

    real, entered = torch_cuda.launch, [None]

    @contextlib.contextmanager
    def device(wanted: Any) -> Iterator[None]:
        entered.append(wanted)
        yield
        entered.pop()

    monkeypatch.setattr(torch_cuda, "launch", launch)
    monkeypatch.setattr(torch_cuda, "kernels", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=4711))
    return launches


def test_the_work_goes_to_the_current_stream_of_the_tensors_device(stream: list[Any], cuda: EmulatedCuda) -> None:
    call = make_call([(1, 5), (20, 40)], dtype=BFLOAT16)
    inputs = inputs_of(call)
    attn = torch_op._on_cuda(inputs, call.attributes)
    assert stream == [(torch.device("cpu"), 4711)]
    expected, _ = cuda.paged_attention(**call.tensors, **call.attributes)
    np.testing.assert_array_equal(bytes_of(attn), expected.view(np.uint8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"kv_cache": torch.float8_e4m3fn}, None),
        ({"qkv": torch.float32}, "qkv is torch.float32; PagedAttention on cuda takes torch.float16 or torch.bfloat16"),
        ({"q_norm": torch.float32}, "q_norm is torch.float32; PagedAttention on cuda takes torch.float16"),
        ({"rope": torch.float16}, "rope is torch.float16; PagedAttention on cuda takes torch.float32"),
        ({"kv_cache": torch.bfloat16}, "kv_cache is torch.bfloat16; .* takes torch.float16 or torch.float8_e4m3fn"),
        ({"positions": torch.int64}, "positions is torch.int64; PagedAttention on cuda takes torch.int32"),
        ({"positions": "cpu"}, "positions is on cpu; qkv is on cuda:0"),
    ],
)
def test_types_on_cuda(changes: dict[str, Any], message: str | None) -> None:
    with FakeTensorMode():
        types = dict.fromkeys((value.name for value in PAGED_ATTENTION.inputs), torch.float16)
        types |= dict.fromkeys(("positions", "block_tables", "seq_lens", "query_start"), torch.int32)
        types |= {"rope": torch.float32} | {name: kind for name, kind in changes.items() if kind != "cpu"}
        devices = {name: "cpu" if changes.get(name) == "cpu" else "cuda" for name in types}
        inputs = {name: torch.empty(4, dtype=kind, device=devices[name]) for name, kind in types.items()}
        with contextlib.nullcontext() if message is None else pytest.raises(ConfigError, match=message):
            torch_op._check_types(inputs)


@NEEDS_GPU
@pytest.mark.parametrize("head_dim", [64, 128])
@DTYPES
def test_on_a_gpu(dtype: Any, head_dim: int) -> None:
    call = make_call(MIXED, dtype=dtype, head_dim=head_dim, padding_rows=3)
    tensors = [tensor(call.tensors[value.name]).cuda() for value in PAGED_ATTENTION.inputs]
    attributes = {item.name: call.attributes.get(item.name, item.default) for item in PAGED_ATTENTION.attributes}
    attn, pool = torch_op.paged_attention(*tensors, *attributes.values())
    in_place = torch_op.paged_attention_in_place(*tensors, **attributes)
    exact = {name: call.tensors[name].astype(np.float32) for name in ("qkv", "q_norm", "k_norm")}
    expected, expected_pool = reference.paged_attention(**call.arguments | exact)
    bound, end = ATTN_TOLERANCE[np.dtype(dtype)], int(call.tensors["query_start"][-1])
    for one in (attn, in_place):
        np.testing.assert_allclose(one[:end].float().cpu(), expected[:end], rtol=bound, atol=bound)
        assert not one[end:].any()
    for one in (pool, tensors[torch_op.KV_CACHE]):
        np.testing.assert_allclose(one.float().cpu(), expected_pool.astype(np.float32), rtol=bound, atol=bound)
