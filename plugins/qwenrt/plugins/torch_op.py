"""PagedAttention in PyTorch: importing this registers torch.ops.qwenrt.paged_attention over our kernels for CPU and CUDA."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from . import torch_cuda
from .errors import ConfigError
from .library import cpu_library
from .schema import INT8_SCALE_BYTES, PAGED_ATTENTION

KV_CACHE = [value.name for value in PAGED_ATTENTION.inputs].index("kv_cache")
"""Where kv_cache stands among the op's inputs."""
_CACHE_TYPES = {torch.float32: 1, torch.int8: 3, torch.float16: 10}
_POINTERS = [*(value.name for value in PAGED_ATTENTION.inputs), *(value.name for value in PAGED_ATTENTION.outputs)]
_SIZES = ("num_tokens", "max_positions", "num_blocks", "num_seqs", "max_blocks")
_INDICES = ("positions", "block_tables", "seq_lens", "query_start")
_INTEGERS = ("num_heads", "num_kv_heads", "head_dim", "block_size", "sliding_window")


class _Arguments(ctypes.Structure):
    """QwenrtPagedAttention of plugins/cpu/c_api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in (*_SIZES, *_INTEGERS)),
        ("scale", ctypes.c_float),
        ("norm_eps", ctypes.c_float),
        ("kv_type", ctypes.c_int32),
    )


@functools.cache
def _kernel() -> Any:
    kernel = ctypes.CDLL(str(cpu_library())).qwenrt_paged_attention
    kernel.argtypes = [ctypes.POINTER(_Arguments), ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    return kernel


def paged_attention_in_place(*tensors: Tensor, **attributes: float) -> Tensor:
    """PagedAttention where qkv lies, writing into the `kv_cache` among `tensors`; returns attn [T, num_heads * head_dim].

    tensors, attributes: as `schema.PAGED_ATTENTION` has them. On the CPU qkv is float32, kv_cache float32, float16 or int8. On
    CUDA qkv is float16 or bfloat16 and kv_cache of the same type or float8_e4m3fn; the work is queued on PyTorch's current
    stream. Raises ConfigError naming the input that is wrong, before anything is written; on CUDA, what the index tensors hold is
    not checked.
    """
    names = [value.name for value in PAGED_ATTENTION.inputs]
    inputs = dict(zip(names, (tensor.contiguous() for tensor in tensors), strict=True))
    values = {item.name: attributes.get(item.name, item.default) for item in PAGED_ATTENTION.attributes}
    _check_types(inputs)
    _check_shapes(inputs, {name: int(values[name] or 0) for name in _INTEGERS})
    if not tensors[KV_CACHE].is_contiguous():
        raise ConfigError("kv_cache is not contiguous; it is written in place")
    return _on_cuda(inputs, values) if inputs["qkv"].is_cuda else _on_cpu(inputs, values)


def _on_cpu(inputs: dict[str, Tensor], values: dict[str, Any]) -> Tensor:
    qkv, cache = inputs["qkv"], inputs["kv_cache"]
    attn = qkv.new_empty(qkv.shape[0], int(values["num_heads"] or 0) * int(values["head_dim"] or 0))
    arguments = _Arguments(
        **{name: tensor.data_ptr() if tensor.numel() else None for name, tensor in inputs.items()},
        attn=attn.data_ptr(),
        kv_cache_out=cache.data_ptr(),
        num_tokens=qkv.shape[0],
        max_positions=inputs["rope"].shape[0],
        num_blocks=cache.shape[0],
        num_seqs=inputs["seq_lens"].shape[0],
        max_blocks=inputs["block_tables"].shape[1],
        kv_type=_CACHE_TYPES[cache.dtype],
        **values,
    )
    error = ctypes.create_string_buffer(512)
    if _kernel()(ctypes.byref(arguments), torch.get_num_threads(), error, len(error)):
        raise ConfigError(error.value.decode())
    return attn


def _on_cuda(inputs: dict[str, Tensor], values: dict[str, Any]) -> Tensor:
    device = inputs["qkv"].device
    with torch.cuda.device(device):
        return torch_cuda.launch(torch_cuda.kernels(), inputs, values, torch.cuda.current_stream(device).cuda_stream)


def _check_types(inputs: dict[str, Tensor]) -> None:
    device, dtype = inputs["qkv"].device, inputs["qkv"].dtype
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"qkv is on {device}; PagedAttention runs on cpu and cuda")
    types = (torch.float32,) if device.type == "cpu" else torch_cuda.HALF_TYPES
    caches = tuple(_CACHE_TYPES) if device.type == "cpu" else (dtype, torch.float8_e4m3fn)
    expected = {
        **dict.fromkeys(inputs, (dtype,)),
        **dict.fromkeys(_INDICES, (torch.int32,)),
        "rope": (torch.float32,),
        "qkv": types,
        "kv_cache": caches,
    }
    for name, tensor in inputs.items():
        if tensor.device != device:
            raise ConfigError(f"{name} is on {tensor.device}; qkv is on {device}")
        if tensor.dtype not in expected[name]:
            takes = " or ".join(map(str, expected[name]))
            raise ConfigError(f"{name} is {tensor.dtype}; PagedAttention on {device.type} takes {takes}")


def _check_shapes(inputs: dict[str, Tensor], sizes: dict[str, int]) -> None:
    """Make sure that every address the kernel computes lies in its tensor; what the values say is checked by the kernel."""
    heads, kv_heads, head_dim, block_size = (sizes[name] for name in _INTEGERS[:4])
    num_tokens, num_seqs = inputs["qkv"].shape[0], inputs["seq_lens"].shape[0]
    norms = {name: (head_dim if inputs[name].numel() else 0,) for name in ("q_norm", "k_norm")}
    kv_row = head_dim + INT8_SCALE_BYTES * (inputs["kv_cache"].dtype == torch.int8)
    expected: dict[str, tuple[int, ...]] = {
        "qkv": (num_tokens, (heads + 2 * kv_heads) * head_dim),
        **norms,
        "rope": (inputs["rope"].shape[0], head_dim),
        "positions": (num_tokens,),
        "kv_cache": (inputs["kv_cache"].shape[0], 2, kv_heads, block_size, kv_row),
        "block_tables": (num_seqs, inputs["block_tables"].shape[-1]),
        "seq_lens": (num_seqs,),
        "query_start": (num_seqs + 1,),
    }
    for name, shape in expected.items():
        if inputs[name].shape != shape:
            raise ConfigError(f"{name} has shape {list(inputs[name].shape)}, must be {list(shape)}")


def _paged_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The functional op; half types, which the kernel lacks, are computed in float32 and rounded."""
    tensors, attributes = _split(arguments)
    dtype, kv_dtype = tensors[0].dtype, tensors[KV_CACHE].dtype
    tensors[:KV_CACHE] = [tensor.float() if tensor.dtype == dtype else tensor for tensor in tensors[:KV_CACHE]]
    cache = tensors[KV_CACHE].clone() if kv_dtype in _CACHE_TYPES else tensors[KV_CACHE].float()
    tensors[KV_CACHE] = cache
    return paged_attention_in_place(*tensors, **attributes).to(dtype), cache.to(kv_dtype)


def _output_shapes(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, attributes = _split(arguments)
    qkv = tensors[0]
    attn = qkv.new_empty(qkv.shape[0], attributes["num_heads"] * attributes["head_dim"])
    return attn, torch.empty_like(tensors[KV_CACHE])


def _split(arguments: tuple[Any, ...]) -> tuple[list[Tensor], dict[str, Any]]:
    count = len(PAGED_ATTENTION.inputs)
    names = [attribute.name for attribute in PAGED_ATTENTION.attributes]
    return list(arguments[:count]), dict(zip(names, arguments[count:], strict=True))


paged_attention = torch.library.custom_op(
    "qwenrt::paged_attention",
    _paged_attention,
    mutates_args=(),
    schema=PAGED_ATTENTION.torch_schema,
    device_types=("cpu", "cuda"),
)
"""The functional form: returns (attn, kv_cache_out) and leaves kv_cache as it was. This is what a trace sees."""
paged_attention.register_fake(_output_shapes)
