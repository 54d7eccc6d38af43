"""The ops on CUDA tensors of PyTorch: their addresses, handed to the kernels of plugins/cuda."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from .cuda_api import DATA_TYPES, Args, CudaKernels, ExpertsArgs, ExpertsShape, Shape
from .errors import ConfigError
from .library import cuda_library

HALF_TYPES = (torch.float16, torch.bfloat16)
_POINTERS = ("qkv", "q_norm", "k_norm", "rope", "positions", "kv_cache", "block_tables", "seq_lens", "query_start")
_ATTRIBUTES = ("num_heads", "num_kv_heads", "head_dim", "block_size", "sliding_window", "scale", "norm_eps")


@functools.cache
def kernels() -> CudaKernels:
    """The library that `make cuda` builds; raises ConfigError if it is missing."""
    return CudaKernels(cuda_library())


def launch(cuda: CudaKernels, inputs: Mapping[str, Tensor], attributes: Mapping[str, float], stream: int) -> Tensor:
    """Queue PagedAttention on `stream`, writing into the `kv_cache` among `inputs`; returns attn [T, num_heads * head_dim].

    inputs: contiguous tensors by the names of the spec, of shapes and types that were checked, all where the kernels can reach
    them. Raises ConfigError if the kernels cannot run these sizes, DeviceError if CUDA does not take the launch.
    """
    qkv, cache = inputs["qkv"], inputs["kv_cache"]
    shape = Shape(
        num_tokens=qkv.shape[0],
        num_seqs=inputs["seq_lens"].shape[0],
        max_blocks=inputs["block_tables"].shape[1],
        num_blocks=cache.shape[0],
        max_positions=inputs["rope"].shape[0],
        dtype=_data_type(qkv),
        kv_dtype=_data_type(cache),
        **{name: attributes[name] for name in _ATTRIBUTES},
    )
    if reason := cuda.unsupported(shape):
        raise ConfigError(f"PagedAttention on CUDA: {reason}")
    attn = qkv.new_empty(qkv.shape[0], shape.num_heads * shape.head_dim)
    # From PyTorch's allocator, which gives the memory to later work of the same stream only.
    workspace = torch.empty(cuda.workspace_size(shape), dtype=torch.uint8, device=qkv.device)
    pointers = {name: inputs[name].data_ptr() if inputs[name].numel() else None for name in _POINTERS}
    cuda.launch(
        Args(
            shape=shape,
            **pointers,
            kv_cache_out=pointers["kv_cache"],
            attn=attn.data_ptr(),
            workspace=workspace.data_ptr(),
            workspace_size=workspace.numel(),
            stream=stream,
        )
    )
    return attn


def experts_shape(
    x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, norm_topk_prob: int
) -> ExpertsShape | None:
    """What the kernels are to be told of a MixtureOfExperts; None if its tensors are not all of one 16-bit type."""
    if x.dtype not in HALF_TYPES or any(tensor.dtype != x.dtype for tensor in (router_logits, gate_up, down)):
        return None
    return ExpertsShape(
        num_tokens=x.shape[0],
        num_experts=router_logits.shape[1],
        top_k=top_k,
        hidden=x.shape[1],
        inner=down.shape[1],
        norm_topk_prob=norm_topk_prob,
        dtype=_data_type(x),
    )


def launch_experts(
    cuda: CudaKernels,
    shape: ExpertsShape,
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    stream: int,
) -> Tensor:
    """Queue MixtureOfExperts, of a shape that is supported, on `stream`; returns y. The tensors are contiguous.

    Raises DeviceError if CUDA does not take the launch.
    """
    y = torch.empty_like(x)
    workspace = torch.empty(cuda.workspace_size(shape), dtype=torch.uint8, device=x.device)
    cuda.launch(
        ExpertsArgs(
            shape=shape,
            x=x.data_ptr(),
            router_logits=router_logits.data_ptr(),
            gate_up=gate_up.data_ptr(),
            down=down.data_ptr(),
            y=y.data_ptr(),
            workspace=workspace.data_ptr(),
            workspace_size=workspace.numel(),
            stream=stream,
        )
    )
    return y


def _data_type(tensor: Tensor) -> int:
    return DATA_TYPES[str(tensor.dtype).removeprefix("torch.")]
