"""The C API of plugins/cuda over ctypes: addresses and sizes, whoever owns the memory."""

from __future__ import annotations

import ctypes
from pathlib import Path

from .errors import ConfigError, DeviceError
from .schema import MIXTURE_OF_EXPERTS, PAGED_ATTENTION

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


class ExpertsShape(ctypes.Structure):
    """qwenrt::cuda::MixtureOfExpertsShape."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in ("num_tokens", "num_experts", "top_k", "hidden", "inner", "norm_topk_prob", "dtype")
    )


class ExpertsArgs(ctypes.Structure):
    """qwenrt::cuda::MixtureOfExpertsArgs."""

    _fields_ = (
        ("shape", ExpertsShape),
        *((name, ctypes.c_void_p) for name in ("x", "router_logits", "gate_up", "down", "y", "workspace")),
        ("workspace_size", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    )


ENTRIES = {Shape: "qwenrt_paged_attention", ExpertsShape: "qwenrt_mixture_of_experts"}
"""The function that runs a whole op, by the type of the op's shapes."""
_OPS = {Shape: PAGED_ATTENTION.name, ExpertsShape: MIXTURE_OF_EXPERTS.name}


class CudaKernels:
    """The kernels' library, loaded."""

    def __init__(self, library: Path) -> None:
        """Raises ConfigError if the system cannot load `library`."""
        try:
            self.library = ctypes.CDLL(str(library))
        except OSError as error:
            raise ConfigError(f"{library} does not load: {error}; build it again with: make cuda") from None
        for entry in ENTRIES.values():
            getattr(self.library, f"{entry}_unsupported").restype = ctypes.c_char_p
            getattr(self.library, f"{entry}_workspace_size").restype = ctypes.c_size_t

    def unsupported(self, shape: Shape | ExpertsShape) -> str | None:
        """Why the kernels cannot run this shape, or None."""
        message = getattr(self.library, f"{ENTRIES[type(shape)]}_unsupported")(ctypes.byref(shape))
        return None if message is None else message.decode()

    def workspace_size(self, shape: Shape | ExpertsShape) -> int:
        """Bytes of workspace for this shape."""
        return int(getattr(self.library, f"{ENTRIES[type(shape)]}_workspace_size")(ctypes.byref(shape)))

    def launch(self, args: Args | ExpertsArgs) -> None:
        """Queue the op on `args.stream`; raises DeviceError with the cudaError_t if it cannot be."""
        status = getattr(self.library, ENTRIES[type(args.shape)])(ctypes.byref(args))
        if status:
            raise DeviceError(f"{_OPS[type(args.shape)]} could not be launched: cudaError_t {status}")
