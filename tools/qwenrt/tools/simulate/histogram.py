"""Percentiles of more values than one wants to keep."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

_PER_E = 200
"""Bins for each factor of e: a percentile is right to 0.25 %."""


class Histogram:
    """Positive values in bins of equal ratio."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = 0.0

    def add(self, value: float, count: int) -> None:
        """Count a value `count` times."""
        if count:
            self._counts[round(_PER_E * math.log(value))] += count
            self._total += value * count

    def merge(self, other: Histogram) -> None:
        """Count what another one has."""
        self._counts.update(other._counts)
        self._total += other._total

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self._counts.values())

    @property
    def mean(self) -> float:
        """Their mean; NaN of none."""
        return self._total / self.count if self._counts else math.nan

    def percentile(self, percent: float) -> float:
        """The value that `percent` of all do not exceed; NaN of none."""
        values, ends = self.cumulative()
        if not len(values):
            return math.nan
        return float(values[np.searchsorted(ends, percent / 100)])

    def cumulative(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Values in order, and the share of all that each and those below it are."""
        bins = sorted(self._counts)
        ends = np.cumsum([self._counts[one] for one in bins], dtype=np.float64)
        return np.exp(np.array(bins) / _PER_E), ends / ends[-1] if len(ends) else ends
