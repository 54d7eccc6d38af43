"""PagedAttention on CUDA tensors of PyTorch: their addresses, handed to the kernels of plugins/cuda."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from .cuda_api import DATA_TYPES, Args, CudaKernels, Shape
from .errors import ConfigError
from .library import cuda_library

QKV_TYPES = (torch.float16, torch.bfloat16)
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


def _data_type(tensor: Tensor) -> int:
    return DATA_TYPES[str(tensor.dtype).removeprefix("torch.")]
