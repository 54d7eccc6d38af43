"""One token for each row of logits, by the compiled library."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ConfigError
from .library import cpu_library

_RULE = struct.Struct("=ffdq")
"""QwenrtSamplingRule of plugins/cpu/c_api.h."""
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


class _SampleRows(ctypes.Structure):
    """QwenrtSampleRows of plugins/cpu/c_api.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("rules", ctypes.c_char_p),
        ("uniforms", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
    )


@functools.cache
def _kernel() -> Any:
    kernel = ctypes.CDLL(str(cpu_library())).qwenrt_sample_rows
    kernel.argtypes = [ctypes.POINTER(_SampleRows), ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    return kernel


GREEDY = _RULE.pack(0.0, -math.inf, 1.0, 0)
"""The rule that takes the largest logit, of equal ones the first."""


def sampling_rule(*, temperature: float, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> bytes:
    """The rule that draws from softmax(logits / temperature), cut to what min_p, top_k and then top_p leave.

    temperature: above 0. top_k: of equal logits the first stay; 0 or less for all.
    """
    # A factor that is never 0 keeps masked logits (-inf) masked at any temperature.
    scale = max(1.0 / temperature, _SMALLEST_SCALE)
    return _RULE.pack(scale, math.log(min_p) if min_p else -math.inf, top_p, max(top_k, 0))


def sample_rows(
    logits: npt.NDArray[np.float32], rules: Iterable[bytes], uniforms: Sequence[float], *, threads: int = 1
) -> list[int]:
    """A token for each row of `logits` [R, vocab], C-contiguous; -1 where a logit is NaN or the largest is not finite.

    A row's token depends on its own logits, rule (`sampling_rule` or `GREEDY`) and uniform number in [0, 1) alone. threads: 0 for
    one per core.
    """
    rows, vocab = logits.shape
    packed, numbers, tokens = b"".join(rules), array("d", uniforms), array("i", bytes(4 * rows))
    assert logits.flags.c_contiguous
    assert len(packed) == rows * _RULE.size
    assert len(numbers) == rows
    address = logits.__array_interface__["data"][0]
    op = ctypes.byref(_SampleRows(address, packed, numbers.buffer_info()[0], tokens.buffer_info()[0], rows, vocab))
    kernel = _kernel()
    if kernel(op, threads, None, 0):
        error = ctypes.create_string_buffer(200)
        kernel(op, threads, error, len(error))
        raise ConfigError(error.value.decode())
    return tokens.tolist()
