"""The comparison as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .results import HISTOGRAM_EDGES, Comparison


def to_json(results: Sequence[Comparison]) -> str:
    """All numbers, indented; what is not finite, which JSON has no number for, is the text "inf" or "nan"."""
    comparisons = [
        {
            "passed": result.passed,
            "verdict": result.verdict,
            **asdict(result),
            "checks": [{**asdict(check), "passed": check.passed} for check in result.checks],
        }
        for result in results
    ]
    report = {
        "passed": all(result.passed for result in results),
        "histogram_edges": HISTOGRAM_EDGES,
        "comparisons": comparisons,
    }
    return json.dumps(_finite(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
