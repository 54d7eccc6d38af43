"""PNG plots of a simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from .report import seconds_per_token
from .simulation import Cluster, Results

_DPI = 150


def draw(folder: Path, results: Results, cluster: Cluster) -> list[Path]:
    """Write latency.png and load.png; returns those written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in (("latency.png", _latency(results)), ("load.png", _load(results, cluster))):
        figure.savefig(folder / name, dpi=_DPI)
        written.append(folder / name)
    return written


def _latency(results: Results) -> Figure:
    """The share of requests, or of gaps between tokens, that took no longer."""
    figure = Figure((7, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, seconds in (
        ("time to first token", np.array(results.ttft)),
        ("time per token", seconds_per_token(results)),
        ("whole request", np.array(results.e2e)),
    ):
        shares = np.linspace(0, 1, 1001)
        axes.plot(1000 * np.quantile(seconds, shares), shares, label=label)
    values, ends = results.gaps.cumulative()
    axes.plot(1000 * values, ends, label="between tokens")
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share that took no longer")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _load(results: Results, cluster: Cluster) -> Figure:
    """Requests and KV blocks over time."""
    figure = Figure((7, 5), layout="constrained")
    requests, blocks = figure.subplots(2, 1, sharex=True)
    times = [entry[0] for entry in results.timeline]
    requests.plot(times, [entry[1] for entry in results.timeline], label="running")
    requests.plot(times, [entry[2] for entry in results.timeline], label="waiting")
    requests.set_ylabel("requests")
    requests.legend(frameon=False)
    total = cluster.replicas * cluster.engine.num_kv_blocks
    blocks.plot(times, [100 * entry[3] / total for entry in results.timeline])
    blocks.set_ylabel("KV blocks in use, %")
    blocks.set_xlabel("seconds")
    for axes in (requests, blocks):
        axes.grid(alpha=0.3)
    return figure
