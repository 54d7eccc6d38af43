"""One token for each row of logits, and what log-probabilities are made of, by the compiled library."""

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


class _DescribeRows(ctypes.Structure):
    """QwenrtDescribeRows of plugins/cpu/c_api.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("log_sums", ctypes.c_void_p),
        ("top", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("count", ctypes.c_int64),
    )


@functools.cache
def _kernel(name: str, op: type[ctypes.Structure]) -> Any:
    kernel = getattr(ctypes.CDLL(str(cpu_library())), name)
    kernel.argtypes = [ctypes.POINTER(op), ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    return kernel


def _run(name: str, op: ctypes.Structure, threads: int) -> None:
    kernel = _kernel(name, type(op))
    if kernel(op, threads, None, 0):
        error = ctypes.create_string_buffer(200)
        kernel(op, threads, error, len(error))
        raise ConfigError(error.value.decode())


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
    op = _SampleRows(address, packed, numbers.buffer_info()[0], tokens.buffer_info()[0], rows, vocab)
    _run("qwenrt_sample_rows", op, threads)
    return tokens.tolist()


def describe_row(logits: npt.NDArray[np.float32], count: int) -> tuple[float, list[int]]:
    """The log of the sum of e^logit (nats) of a row `logits` [V], contiguous, and the ids of its `count` largest logits.

    A token's log-probability is its logit minus the former. Ids come from the largest down, of equal logits the lowest first; all
    V of them if `count` is more. (nan, []) where a logit is NaN or the largest is not finite.
    """
    count = min(count, len(logits))
    log_sum, top = array("d", bytes(8)), array("i", bytes(4 * count))
    assert logits.flags.c_contiguous
    address = logits.__array_interface__["data"][0]
    op = _DescribeRows(address, log_sum.buffer_info()[0], top.buffer_info()[0], 1, len(logits), count)
    _run("qwenrt_describe_rows", op, 1)
    return log_sum[0], [] if math.isnan(log_sum[0]) else top.tolist()
