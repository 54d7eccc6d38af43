"""Traces as figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from .client import Trace

_PERCENTILES = (50, 95, 99)


def summarize(traces: Sequence[Trace]) -> dict[str, Any]:
    """Throughput over the whole run, and percentiles of the answered requests' times in milliseconds.

    ttft: from the sending (open loop: from when it was due) to the first text. itl: between two events with text. e2e: to the
    end.
    """
    good = [trace for trace in traces if trace.error is None]
    errors = Counter(trace.error for trace in traces if trace.error is not None)
    result: dict[str, Any] = {
        "requests": len(traces),
        "failed": len(traces) - len(good),
        "errors": dict(errors.most_common(5)),
    }
    if not good:
        return result
    seconds = max(trace.ended for trace in traces) - min(trace.started for trace in traces)
    output = sum(trace.completion_tokens for trace in good)
    prompt = sum(trace.prompt_tokens for trace in good)
    gaps = np.concatenate([np.diff(trace.arrivals) for trace in good])
    return result | {
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
        "ttft_ms": _percentiles([trace.arrivals[0] - trace.started for trace in good if trace.arrivals]),
        "itl_ms": _percentiles(gaps),
        "e2e_ms": _percentiles([trace.ended - trace.started for trace in good]),
    }


def _percentiles(seconds: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float] | None:
    """p50, p95, p99 and mean in milliseconds; None of nothing."""
    if not len(seconds):
        return None
    values = 1000 * np.asarray(seconds)
    return {f"p{p}": float(np.percentile(values, p)) for p in _PERCENTILES} | {"mean": float(values.mean())}


def table(url: str, runs: Sequence[dict[str, Any]]) -> Table:
    """One column a run."""
    result = Table("measurement", *(run["load"] for run in runs), title=Text(url))
    for column in result.columns[1:]:
        column.justify = "right"
    result.add_row("failed", *(f"{run['failed']} of {run['requests']}" for run in runs))
    for label, name in (("requests", "requests_per_s"), ("output tokens", "output_tokens_per_s")):
        result.add_row(label, *(f"{run[name]:.4g} /s" if name in run else "-" for run in runs))
    for label, name in (("to first token", "ttft_ms"), ("between tokens", "itl_ms"), ("whole request", "e2e_ms")):
        for percentile in _PERCENTILES:
            times = [run.get(name) for run in runs]
            cells = [f"{one[f'p{percentile}']:.4g} ms" if one else "-" for one in times]
            result.add_row(f"{label}, p{percentile}", *cells)
    return result
