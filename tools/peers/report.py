"""Results as tables in Markdown: ours against each rival, and the ratio to the best of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Result = dict[str, Any]

OURS = "qwenrt"
_MIB = 2**20
_BUSY = 0.15
"""CPUs that others may use during a run: one with more counts only if there is no other, and is marked with a star."""


def report(results: Sequence[Result]) -> str:
    """One table for each kind of weights: rates (tokens a second, higher is better), peak memory and load (lower is better)."""
    kinds = sorted({result["weights"] for result in results}, key=["int4", "int8", "float32"].index)
    return "\n\n".join(_table(kind, [result for result in results if result["weights"] == kind]) for kind in kinds)


def ratio(ours: float | None, rivals: Sequence[float], *, higher_is_better: bool) -> float | None:
    """How many times better ours is than the best rival: above 1 is better. None if either is missing."""
    if ours is None or not rivals:
        return None
    return ours / max(rivals) if higher_is_better else min(rivals) / ours


def rate(result: Result) -> tuple[float, bool]:
    """Tokens a second, the median of the runs that nobody disturbed (of all, if each was), and whether that is so."""
    runs = list(zip(result["tokens_per_s"], result["other_cpus"], strict=True))
    calm = [tokens for tokens, others in runs if others <= _BUSY]
    return statistics.median(calm or result["tokens_per_s"]), bool(calm)


def _table(kind: str, results: Sequence[Result]) -> str:
    names = sorted({result["who"] for result in results}, key=lambda name: (name == OURS, name))
    workloads = list(dict.fromkeys(result["workload"] for result in results))
    lines = [[kind, *names, "ours to the best rival"], ["---"] * (len(names) + 2)]

    def add(label: str, workload: str, of: Callable[[Result], float], digits: str, *, higher_is_better: bool) -> None:
        found = {one["who"]: one for one in results if one["workload"] == workload}
        values = {name: of(one) for name, one in found.items()}
        rivals = [value for name, value in values.items() if name != OURS]
        times = ratio(values.get(OURS), rivals, higher_is_better=higher_is_better)
        cells = [format(values[name], digits) if name in values else "-" for name in names]
        if higher_is_better:
            cells = [
                cell + ("" if name not in found or rate(found[name])[1] else "*")
                for name, cell in zip(names, cells, strict=True)
            ]
        lines.append([label, *cells, "-" if times is None else f"{times:.2f}x"])

    for workload in workloads:
        add(f"{workload}, tok/s", workload, lambda one: rate(one)[0], ".4g", higher_is_better=True)
    for workload in workloads:
        add(
            f"peak memory, {workload}, MiB",
            workload,
            lambda one: one["peak_rss_bytes"] / _MIB,
            ".0f",
            higher_is_better=False,
        )
    if workloads:
        add("load, s", workloads[0], lambda one: one["load_s"], ".2f", higher_is_better=False)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
