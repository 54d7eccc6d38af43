"""Runs of a load as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from .trace import PERCENTILES


def table(title: str, runs: Sequence[dict[str, Any]]) -> Table:
    """One column a run, which is a summary with its `load`."""
    result = Table("measurement", *(run["load"] for run in runs), title=Text(title))
    for column in result.columns[1:]:
        column.justify = "right"
    result.add_row("failed", *(f"{run['failed']:g} of {run['requests']:g}" for run in runs))
    for label, name in (
        ("requests", "requests_per_s"),
        ("requests within the SLO (goodput)", "goodput_per_s"),
        ("output tokens", "output_tokens_per_s"),
    ):
        result.add_row(label, *(f"{run[name]:.4g} /s" if name in run else "-" for run in runs))
    result.add_row(
        "prompt tokens from the prefix cache",
        *(f"{100 * run['cached_share']:.3g} %" if "cached_share" in run else "-" for run in runs),
    )
    for label, name in (("to first token", "ttft_ms"), ("between tokens", "itl_ms"), ("whole request", "e2e_ms")):
        for percentile in PERCENTILES:
            times = [run.get(name) for run in runs]
            cells = [f"{one[f'p{percentile}']:.4g} ms" if one else "-" for one in times]
            result.add_row(f"{label}, p{percentile}", *cells)
    return result
