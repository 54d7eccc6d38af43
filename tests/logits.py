"""Rows of logits that try a sampler: ties, masks, peaks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LOGIT_KINDS = ("normal", "flat", "steps", "peaked", "half masked")


def logits_of(kind: str, size: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """A row [size] of one of LOGIT_KINDS."""
    values = rng.normal(0, 3, size)
    if kind == "flat":
        values = np.zeros(size)
    elif kind == "steps":
        values = rng.integers(-3, 4, size).astype(float)
    elif kind == "peaked":
        values[rng.integers(size)] += 30
    elif kind == "half masked":
        values[rng.random(size) < 0.5] = -np.inf
        values[rng.integers(size)] = 0
    return values.astype(np.float32)
