"""When the parts of an answer came, of an engine or of a server, and what follows from many of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Seconds = np.ndarray[tuple[int], np.dtype[np.float64]]

PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class Trace:
    """Times of one request, in seconds of `perf_counter`, and its tokens as the server counts them; `error` if it failed."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    """When each piece of the answer came: the first one is the time to the first token."""
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.arrivals[0] - self.started if self.arrivals else None

    @property
    def tpot(self) -> float:
        """Seconds a token after the first, on average; 0 if there was one token."""
        after = self.completion_tokens - 1
        return (self.arrivals[-1] - self.arrivals[0]) / after if after > 0 and self.arrivals else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must keep to count for goodput, in seconds: time to the first token, and a token after it on average."""

    ttft: float
    tpot: float

    def met_by(self, trace: Trace) -> bool:
        """Whether an answered request kept it."""
        return trace.ttft is not None and trace.ttft <= self.ttft and trace.tpot <= self.tpot


def latencies(traces: Sequence[Trace]) -> dict[str, Seconds]:
    """Seconds of all answered requests: ttft, itl (between two pieces of an answer) and e2e (to the end)."""
    good = [trace for trace in traces if trace.error is None]
    return {
        "ttft": np.array([trace.ttft for trace in good if trace.ttft is not None]),
        "itl": np.concatenate([np.diff(trace.arrivals) for trace in good] or [np.empty(0)]),
        "e2e": np.array([trace.ended - trace.started for trace in good]),
    }


def summarize(traces: Sequence[Trace], slo: Slo) -> dict[str, Any]:
    """Throughput over the whole run, goodput, and percentiles of the answered requests' times in milliseconds.

    ttft: from the sending (open loop: from when it was due) to the first text. itl: between two events with text. e2e: to the
    end. goodput: answered requests a second that kept `slo`.
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
    met = sum(slo.met_by(trace) for trace in good)
    return (
        result
        | {
            "seconds": seconds,
            "requests_per_s": len(good) / seconds,
            "goodput_per_s": met / seconds,
            "slo_share": met / len(traces),
            "prompt_tokens": prompt,
            "cached_share": sum(trace.cached_tokens for trace in good) / prompt,
            "output_tokens": output,
            "output_tokens_per_s": output / seconds,
            "total_tokens_per_s": (prompt + output) / seconds,
        }
        | {f"{name}_ms": _percentiles(values) for name, values in latencies(good).items()}
    )


def median_summary(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians, figure by figure, of several runs of the same load; errors are those of all."""
    result: dict[str, Any] = {}
    for name in summaries[0]:
        values = [summary[name] for summary in summaries if name in summary]
        if name == "errors":
            result[name] = dict(sum((Counter(value) for value in values), Counter[str]()).most_common(5))
        elif isinstance(values[0], dict):
            result[name] = median_summary([value for value in values if value is not None])
        else:
            result[name] = None if values[0] is None else statistics.median(values)
    return result


def _percentiles(seconds: Seconds) -> dict[str, float] | None:
    """p50, p95, p99 and mean in milliseconds; None of nothing."""
    if not len(seconds):
        return None
    values = 1000 * seconds
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES} | {"mean": float(values.mean())}
