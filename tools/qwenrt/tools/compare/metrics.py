"""How far two tensors are apart, and where the most.

The error of a row is its largest |difference| over its largest |expected|: a row that is small as a whole is judged by its own
size. A value that is not finite, or a shape that differs, is an error without bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .feeds import Array

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Deviation:
    """How far a tensor [rows, columns] is from another: the worst row's relative error, and its place."""

    error: float
    """Relative, inf where something is not finite or the shapes differ."""
    row: int | None
    column: int | None
    max_abs: float
    cosine_distance: float
    """1 - cosine of the angle, of the worst row."""
    nonfinite: int
    """NaNs and infinities among the actual values."""
    note: str = ""
    """What is wrong beside the size of the numbers: not finite, another shape."""

    @property
    def finite(self) -> bool:
        """Whether every value was finite."""
        return self.nonfinite == 0


def deviation(actual: Array, expected: Array) -> Deviation:
    """Compare two tensors of equal shape by their rows; the last axis is a row."""
    if actual.shape != expected.shape:
        note = f"has shape {list(actual.shape)}, the reference {list(expected.shape)}"
        return Deviation(math.inf, None, None, math.inf, math.inf, 0, note)
    columns = actual.shape[-1]
    got, want = (array.reshape(-1, columns).astype(np.float32, copy=False) for array in (actual, expected))
    if not got.size:
        return Deviation(0.0, None, None, 0.0, 0.0, 0)
    for values, whose in ((got, ""), (want, "the reference ")):
        bad = ~np.isfinite(values)
        if bad.any():
            row, column = (int(index) for index in np.argwhere(bad)[0])
            kind = "NaN" if np.isnan(values[row, column]) else "Inf"
            count = int(bad.sum())
            note = f"{whose}has {kind} here" + (
                f", and {count - 1} more values that are not finite" if count > 1 else ""
            )
            return Deviation(math.inf, row, column, math.inf, math.inf, count, note)
    differences = np.abs(got - want)
    worst = differences.max(1)
    errors = worst / row_scales(want)
    row = int(errors.argmax())
    return Deviation(
        error=float(errors[row]),
        row=row,
        column=int(differences[row].argmax()),
        max_abs=float(worst.max()),
        cosine_distance=float(_cosine_distances(got, want).max()),
        nonfinite=0,
    )


def row_scales(expected: Floats) -> Floats:
    """[rows] largest magnitude of each row; rows that are zero against the others count as a millionth of the largest."""
    scales: Floats = np.abs(expected).max(1)
    largest = scales.max(initial=0)
    return np.maximum(scales, largest * np.float32(1e-6) if largest else np.float32(1))


def _cosine_distances(actual: Floats, expected: Floats) -> npt.NDArray[np.float64]:
    """[rows] 1 - cos of the angle between rows, from the difference of the unit vectors, so that small angles are not lost."""
    norms = [np.linalg.norm(array, axis=1, keepdims=True).astype(np.float64) for array in (actual, expected)]
    units = [array / np.maximum(norm, 1e-30) for array, norm in zip((actual, expected), norms, strict=True)]
    distances: npt.NDArray[np.float64] = np.square(units[0] - units[1]).sum(1) / 2
    return distances


@dataclass(frozen=True)
class Distributions:
    """How far next-token distributions [rows, vocab] are from the reference's, row by row."""

    kl: npt.NDArray[np.float64]
    """KL(reference || engine) in nats."""
    top1: npt.NDArray[np.bool_]
    """Whether the most likely token is the same."""
    margin: npt.NDArray[np.float64]
    """The reference's logit of its own most likely token less that of the engine's; 0 where they agree."""
    top5: npt.NDArray[np.float64]
    """Share of the reference's five most likely tokens that are among the engine's."""


def distributions(actual: Floats, expected: Floats) -> Distributions:
    """Compare logits [rows, vocab]; both must be finite."""
    expected_top, actual_top = expected.argmax(1), actual.argmax(1)
    rows = np.arange(len(expected))
    count = min(5, expected.shape[1])
    best = [np.argpartition(-logits, count - 1, axis=1)[:, :count] for logits in (actual, expected)]
    shared = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(*best, strict=True)]
    kl = [_kl(got, want) for got, want in zip(actual, expected, strict=True)]
    return Distributions(
        kl=np.array(kl, np.float64),
        top1=expected_top == actual_top,
        margin=(expected[rows, expected_top] - expected[rows, actual_top]).astype(np.float64),
        top5=np.array(shared, np.float64) / count,
    )


def _kl(actual: Floats, expected: Floats) -> float:
    """KL divergence of one row, in float64, never below 0 (which rounding could make it)."""
    q, p = log_softmax(actual), log_softmax(expected)
    return max(0.0, float(np.sum(np.exp(p) * (p - q))))


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    """Log-probabilities over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
