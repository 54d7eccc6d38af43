"""The C API of plugins/cuda over ctypes: addresses and sizes, whoever owns the memory."""

from __future__ import annotations

import ctypes
from pathlib import Path

from .errors import ConfigError, DeviceError
from .schema import PAGED_ATTENTION

DATA_TYPES = {"float16": 0, "bfloat16": 1, "float8_e4m3fn": 2}
"""qwenrt::cuda::DataType, by the names that NumPy (ml_dtypes) and PyTorch have for them."""


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


class CudaKernels:
    """The kernels' library, loaded."""

    def __init__(self, library: Path) -> None:
        """Raises ConfigError if the system cannot load `library`."""
        try:
            self.library = ctypes.CDLL(str(library))
        except OSError as error:
            raise ConfigError(f"{library} does not load: {error}; build it again with: make cuda") from None
        self.library.qwenrt_paged_attention_unsupported.restype = ctypes.c_char_p
        self.library.qwenrt_paged_attention_workspace_size.restype = ctypes.c_size_t

    def unsupported(self, shape: Shape) -> str | None:
        """Why the kernels cannot run this shape, or None."""
        message = self.library.qwenrt_paged_attention_unsupported(ctypes.byref(shape))
        return None if message is None else message.decode()

    def workspace_size(self, shape: Shape) -> int:
        """Bytes of workspace for this shape."""
        return int(self.library.qwenrt_paged_attention_workspace_size(ctypes.byref(shape)))

    def launch(self, args: Args) -> None:
        """Queue PagedAttention on `args.stream`; raises DeviceError with the cudaError_t if it cannot be."""
        status = self.library.qwenrt_paged_attention(ctypes.byref(args))
        if status:
            raise DeviceError(f"{PAGED_ATTENTION.name} could not be launched: cudaError_t {status}")
