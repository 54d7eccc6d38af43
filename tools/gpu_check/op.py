"""The CUDA kernels as a function of NumPy arrays with the reference's signature."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from qwenrt.plugins.cuda_api import DATA_TYPES, ENTRIES, Args, CudaKernels, ExpertsArgs, ExpertsShape, Shape

from .memory import Array, Buffer, Memory


class LaunchError(RuntimeError):
    """A launcher did not return cudaSuccess: `status` is the cudaError_t."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"cudaError {status}: {message}")
        self.status = status


class CudaOp(CudaKernels):
    """A library of the kernels, and the memory that it works in."""

    def __init__(self, library: Path, memory: Memory) -> None:
        super().__init__(library)
        self.path = library
        self.memory = memory

    def launch(self, args: Args | ExpertsArgs, entry: str | None = None) -> None:
        """Calls one launcher, by default that of the whole op; raises LaunchError where it fails."""
        entry = entry or ENTRIES[type(args.shape)]
        status = getattr(self.library, entry)(ctypes.byref(args))
        if status:
            raise LaunchError(status, entry)

    def writes_to(self, buffers: dict[str, Buffer]) -> None:
        """Told, before a launch, the buffers that the kernels may write."""

    def paged_attention(
        self,
        qkv: Array,
        q_norm: Array,
        k_norm: Array,
        rope: Array,
        positions: Array,
        kv_cache: Array,
        block_tables: Array,
        seq_lens: Array,
        query_start: Array,
        *,
        in_place: bool = False,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
        **attributes: Any,
    ) -> tuple[Array, Array]:
        """(attn, kv_cache_out); in_place: with kv_cache bound as both input and output, on a copy of the argument."""
        shape = make_shape(qkv, kv_cache, block_tables, rope, **attributes)
        num_heads, head_dim = attributes["num_heads"], attributes["head_dim"]
        upload = self.memory.upload
        pool = upload(kv_cache)
        written = {
            "kv_cache_out": pool if in_place else upload(np.zeros_like(kv_cache)),
            "attn": upload(np.full((len(qkv), num_heads * head_dim), np.nan, qkv.dtype)),
            "workspace": upload(np.full(self.workspace_size(shape), 0xFF, np.uint8)),
        }
        tensors = {
            "qkv": qkv,
            "q_norm": q_norm if q_norm.size else None,
            "k_norm": k_norm if k_norm.size else None,
            "rope": rope,
            "positions": positions,
            "block_tables": block_tables,
            "seq_lens": seq_lens,
            "query_start": query_start,
            "k_scale": k_scale,
            "v_scale": v_scale,
        }
        buffers = {name: upload(tensor) for name, tensor in tensors.items() if tensor is not None}
        buffers |= {"kv_cache": pool} | written
        pointers = {name: buffer.address for name, buffer in buffers.items()}
        self.writes_to(written)
        self.launch(Args(shape=shape, workspace_size=written["workspace"].nbytes, **pointers))
        return written["attn"].read(), written["kv_cache_out"].read()

    def mixture_of_experts(
        self, x: Array, router_logits: Array, gate_up: Array, down: Array, *, top_k: int, norm_topk_prob: int
    ) -> Array:
        """y [T, hidden], of the type of x."""
        shape = ExpertsShape(
            num_tokens=len(x),
            num_experts=router_logits.shape[1],
            top_k=top_k,
            hidden=x.shape[1],
            inner=down.shape[1],
            norm_topk_prob=norm_topk_prob,
            dtype=DATA_TYPES[x.dtype.name],
        )
        upload = self.memory.upload
        written = {
            "y": upload(np.full_like(x, np.nan)),
            "workspace": upload(np.full(self.workspace_size(shape), 0xFF, np.uint8)),
        }
        tensors = {"x": x, "router_logits": router_logits, "gate_up": gate_up, "down": down}
        buffers = {name: upload(tensor) for name, tensor in tensors.items()} | written
        self.writes_to(written)
        pointers = {name: buffer.address for name, buffer in buffers.items()}
        self.launch(ExpertsArgs(shape=shape, workspace_size=written["workspace"].nbytes, **pointers))
        return written["y"].read()


def make_shape(qkv: Array, kv_cache: Array, block_tables: Array, rope: Array, **attributes: Any) -> Shape:
    """The Shape of these tensors."""
    return Shape(
        num_tokens=len(qkv),
        num_seqs=len(block_tables),
        max_blocks=block_tables.shape[1],
        num_blocks=len(kv_cache),
        max_positions=len(rope),
        dtype=DATA_TYPES[qkv.dtype.name],
        kv_dtype=DATA_TYPES[kv_cache.dtype.name],
        **{"sliding_window": -1, **attributes},
    )
