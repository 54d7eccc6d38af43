"""The C API of plugins/cuda over ctypes, with NumPy arrays where the device pointers go."""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LIBC = ctypes.CDLL(None)

DATA_TYPES = {np.dtype(np.float16): 0, np.dtype(ml_dtypes.bfloat16): 1, np.dtype(ml_dtypes.float8_e4m3fn): 2}


class Shape(ctypes.Structure):
    """qwenrt::cuda::PagedAttentionShape."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_seqs", "max_blocks", "num_blocks", "max_positions")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "sliding_window")),
        ("scale", ctypes.c_float),
        ("norm_eps", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
    )


class Args(ctypes.Structure):
    """qwenrt::cuda::PagedAttentionArgs."""

    _fields_ = (
        ("shape", Shape),
        *(
            (name, ctypes.c_void_p)
            for name in ("qkv", "q_norm", "k_norm", "rope", "positions", "kv_cache", "kv_cache_out")
        ),
        *((name, ctypes.c_void_p) for name in ("block_tables", "seq_lens", "query_start", "k_scale", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("attn", "workspace")),
        ("workspace_size", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    )


class LaunchError(RuntimeError):
    """A launcher did not return cudaSuccess: `status` is the cudaError_t, the text what the emulator says of it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"cudaError {status}: {message}")
        self.status = status


def aligned(array: Array) -> Array:
    """A copy on a 256-byte boundary, as device allocations are, that ends where its allocation ends: AddressSanitizer sees the
    first byte past it."""
    memory = ctypes.c_void_p()
    size = max(array.nbytes, 1)
    if (
        LIBC.posix_memalign(ctypes.byref(memory), ctypes.c_size_t(256), ctypes.c_size_t(size)) != 0
        or memory.value is None
    ):
        raise MemoryError(f"{size} bytes")
    block = (ctypes.c_ubyte * size).from_address(memory.value)
    weakref.finalize(block, LIBC.free, memory)
    copy = np.frombuffer(block, array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    return copy


class EmulatedCuda:
    """The kernels over the emulator, as a function of NumPy arrays with the reference's signature."""

    def __init__(self, library: Path, *, seed: int = 0, num_sms: int = 4) -> None:
        self.path = library
        self.library = ctypes.CDLL(str(library))
        self.library.qwenrt_paged_attention_unsupported.restype = ctypes.c_char_p
        self.library.qwenrt_paged_attention_workspace_size.restype = ctypes.c_size_t
        self.library.simt_error.restype = ctypes.c_char_p
        self.seed = seed
        self.num_sms = num_sms

    def unsupported(self, shape: Shape) -> str | None:
        """Why the kernels cannot run this shape, or None."""
        message = self.library.qwenrt_paged_attention_unsupported(ctypes.byref(shape))
        return None if message is None else message.decode()

    def workspace_size(self, shape: Shape) -> int:
        """Bytes."""
        return int(self.library.qwenrt_paged_attention_workspace_size(ctypes.byref(shape)))

    def launch(self, args: Args, entry: str = "qwenrt_paged_attention") -> None:
        """Calls one launcher; raises LaunchError where it fails."""
        self.library.simt_configure(self.seed, self.num_sms)
        status = getattr(self.library, entry)(ctypes.byref(args))
        if status != 0:
            raise LaunchError(status, self.library.simt_error().decode())

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
        pool = aligned(kv_cache)
        pool_out = pool if in_place else aligned(np.zeros_like(kv_cache))
        attn = aligned(np.full((len(qkv), num_heads * head_dim), np.nan, qkv.dtype))
        workspace = aligned(np.full(self.workspace_size(shape), 0xFF, np.uint8))
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
        buffers = {name: aligned(tensor) for name, tensor in tensors.items() if tensor is not None}
        buffers |= {"kv_cache": pool, "kv_cache_out": pool_out, "attn": attn, "workspace": workspace}
        pointers = {name: buffer.ctypes.data for name, buffer in buffers.items()}
        args = Args(shape=shape, workspace_size=workspace.nbytes, **pointers)
        self.library.simt_unwatch_all()
        for buffer in (pool_out, attn, workspace):
            self.library.simt_watch(ctypes.c_void_p(buffer.ctypes.data), ctypes.c_size_t(buffer.nbytes))
        self.launch(args)
        return attn, pool_out


def make_shape(qkv: Array, kv_cache: Array, block_tables: Array, rope: Array, **attributes: Any) -> Shape:
    """The Shape of these tensors."""
    return Shape(
        num_tokens=len(qkv),
        num_seqs=len(block_tables),
        max_blocks=block_tables.shape[1],
        num_blocks=len(kv_cache),
        max_positions=len(rope),
        dtype=DATA_TYPES[qkv.dtype],
        kv_dtype=DATA_TYPES[kv_cache.dtype],
        **{"sliding_window": -1, **attributes},
    )
