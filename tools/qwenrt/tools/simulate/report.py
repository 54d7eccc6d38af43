"""A simulation's results as figures: JSON and a table."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from ..load.trace import PERCENTILES, Slo
from .simulation import Cluster, Results


def share_met(results: Results, slo: Slo) -> float:
    """Share of all requests, refused ones among them, that kept `slo`."""
    if not results.ttft:
        return 0.0
    met = int(((np.array(results.ttft) <= slo.ttft) & (seconds_per_token(results) <= slo.tpot)).sum())
    return met / (len(results.ttft) + results.refused)


def seconds_per_token(results: Results) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of each request, after the first token; 0 where there was only one."""
    after = np.maximum(np.array(results.new_tokens) - 1, 1)
    seconds: np.ndarray[Any, np.dtype[np.float64]] = (np.array(results.e2e) - np.array(results.ttft)) / after
    return seconds


def summarize(results: Results, slo: Slo) -> dict[str, Any]:
    """Rates over the time from the first arrival to the last end, and percentiles in milliseconds.

    ttft: to the first token. tpot: a token after the first, a request's mean. itl: between two tokens. e2e: to the last.
    """
    total = len(results.ttft) + results.refused
    summary: dict[str, Any] = {"requests": total, "refused": results.refused}
    if not results.ttft:
        return summary
    seconds = results.end - min(results.due)
    output = sum(results.new_tokens)
    share = share_met(results, slo)
    gaps = results.gaps
    itl = {f"p{p}": 1000 * gaps.percentile(p) for p in PERCENTILES} | {"mean": 1000 * gaps.mean}
    return summary | {
        "seconds": seconds,
        "requests_per_s": len(results.ttft) / seconds,
        "goodput_per_s": share * total / seconds,
        "slo_share": share,
        "prompt_tokens": results.prompt_tokens,
        "cached_share": results.cached_tokens / results.prompt_tokens,
        "output_tokens": int(output),
        "output_tokens_per_s": output / seconds,
        "preemptions": results.preemptions,
        "steps": results.steps,
        "ttft_ms": _percentiles(np.array(results.ttft)),
        "tpot_ms": _percentiles(seconds_per_token(results)),
        "itl_ms": itl if gaps.count else None,
        "e2e_ms": _percentiles(np.array(results.e2e)),
    }


def utilisation(results: Results, cluster: Cluster) -> dict[str, Any]:
    """How busy the replicas and how full their KV pools were, while there was anything to do."""
    blocks = cluster.engine.num_kv_blocks
    seconds = results.end - min(results.due) if results.due else 0.0
    return {
        "replicas": cluster.replicas,
        "busy_share": results.busy / (seconds * cluster.replicas) if seconds else 0.0,
        "kv_used_share": results.used_block_seconds / (results.busy * blocks) if results.busy else 0.0,
        "kv_peak_share": results.peak_used_blocks / blocks,
    }


def _percentiles(seconds: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    values = 1000 * seconds
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES} | {"mean": float(values.mean())}


def table(title: str, columns: dict[str, dict[str, Any]]) -> Table:
    """One column for each summary, by its name."""
    result = Table("figure", *columns, title=Text(title))
    for column in result.columns[1:]:
        column.justify = "right"
    summaries = list(columns.values())

    def row(label: str, key: str, form: str, scale: int = 1) -> None:
        if any(key in summary for summary in summaries):
            cells = [format(scale * summary[key], form) if key in summary else "-" for summary in summaries]
            result.add_row(label, *cells)

    row("requests", "requests", ",d")
    row("  refused", "refused", ",d")
    row("requests a second", "requests_per_s", ",.4g")
    row("  within the SLO", "goodput_per_s", ",.4g")
    row("  share within the SLO, %", "slo_share", ".2f", 100)
    row("output tokens a second", "output_tokens_per_s", ",.0f")
    row("prompt tokens cached, %", "cached_share", ".1f", 100)
    row("preemptions", "preemptions", ",d")
    row("replicas busy, %", "busy_share", ".1f", 100)
    row("KV blocks in use while busy, %", "kv_used_share", ".1f", 100)
    row("  most at once, %", "kv_peak_share", ".1f", 100)
    for label, name in (
        ("time to first token", "ttft_ms"),
        ("time per token", "tpot_ms"),
        ("between tokens", "itl_ms"),
        ("whole request", "e2e_ms"),
    ):
        for percentile in ("mean", *(f"p{p}" for p in PERCENTILES)):
            times = [summary.get(name) for summary in summaries]
            result.add_row(f"{label}, {percentile}", *(f"{one[percentile]:,.4g} ms" if one else "-" for one in times))
    return result
