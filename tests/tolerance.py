"""How far results may lie from the reference, per element type: stated here once."""

from __future__ import annotations

from typing import Any

# Largest |difference| over the largest |expected| of a tensor, for PagedAttention; what the pool holds is rounded by its
# own type, so attention over a float16 pool differs by how its keys round to the neighbouring value.
OP = {"float32": 1e-5, "float16": 2e-3}

# As above, for the logits of a few random layers that compute in the type, against float32 with the same weights.
LOGITS = {"float16": 1e-2, "bfloat16": 5e-2}
# The same where inputs of products are rounded to float8 besides.
LOGITS_FLOAT8 = 0.15


def relative_error(actual: Any, expected: Any) -> float:
    """Largest |difference| over the largest |expected|; NaN must meet NaN."""
    import numpy as np

    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert np.array_equal(np.isnan(actual), np.isnan(expected)), "NaN where the other has a number"
    if not expected.size:
        return 0.0
    difference, largest = np.nan_to_num(np.abs(actual - expected)).max(), np.nan_to_num(np.abs(expected)).max()
    return float(difference / max(largest, 1e-30))
