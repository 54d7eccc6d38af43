"""PNG plots of what `qwenrt bench` measured: throughput over concurrency, latencies, where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..load.trace import Seconds
from .steps import PARTS

_DPI = 150


@dataclass(frozen=True, slots=True)
class Drawing:
    """What there is to draw; what is empty is not drawn."""

    throughput: dict[int, float]
    """Output tokens a second by how many requests run at once."""
    latencies: dict[str, dict[str, Seconds]]
    """Samples of ttft and itl by the run's label, in seconds."""
    parts: dict[str, dict[str, float]]
    """Milliseconds of each part of a decoding step by the run's label."""


def of_engine(workloads: Sequence[dict[str, Any]], samples: dict[str, dict[str, Seconds]]) -> Drawing:
    """What the workloads of an engine's result show, with the latencies of each by its label."""
    batches = [entry for entry in workloads if entry["workload"] == "batch"]
    return Drawing(
        throughput={entry["sequences"]: entry["tokens_per_s"]["median"] for entry in batches},
        latencies=samples,
        parts={
            entry["label"]: {
                part: entry["step_ms"]["median"] * max(0.0, entry[f"share_{part}"]["median"])
                for part in (*PARTS, "other")
            }
            for entry in workloads
            if "step_ms" in entry
        },
    )


def of_server(runs: Sequence[dict[str, Any]], samples: dict[str, dict[str, Seconds]]) -> Drawing:
    """What the runs of a server's loads show; what its steps are made of cannot be seen from outside."""
    return Drawing(
        throughput={
            run["concurrency"]: run["output_tokens_per_s"]
            for run in runs
            if run["concurrency"] and "output_tokens_per_s" in run
        },
        latencies=samples,
        parts={},
    )


def draw(folder: Path, drawing: Drawing) -> list[Path]:
    """Write throughput.png, latency.png and step.png as far as there is something to draw; returns those written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if drawing.throughput:
        written.append(_save(_throughput(drawing.throughput), folder / "throughput.png"))
    samples = {label: one for label, one in drawing.latencies.items() if len(one["ttft"])}
    if samples:
        written.append(_save(_latency(samples), folder / "latency.png"))
    if drawing.parts:
        written.append(_save(_step(drawing.parts), folder / "step.png"))
    return written


def _throughput(rates: dict[int, float]) -> Figure:
    figure = Figure((6, 4), layout="constrained")
    axes = figure.add_subplot()
    counts = sorted(rates)
    axes.plot(counts, [rates[count] for count in counts], marker="o")
    axes.set(xlabel="concurrent requests", ylabel="output tokens/s", title="throughput over concurrency")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    return figure


def _latency(samples: dict[str, dict[str, Seconds]]) -> Figure:
    figure = Figure((10, 4 + 0.15 * len(samples)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _cdf(left, {label: one["ttft"] for label, one in samples.items()}, "time to first token, ms")
    _cdf(right, {label: one["itl"] for label, one in samples.items()}, "time between tokens, ms")
    left.set_ylabel("share of requests, tokens")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _cdf(axes: Axes, samples: dict[str, Seconds], label: str) -> None:
    for name, values in samples.items():
        # One without values takes its colour all the same, so that both halves agree.
        ordered = 1000 * np.sort(values)
        shares = np.linspace(0, 1, len(ordered) + 1)[1 - len(ordered[:1]) :]
        axes.step(np.append(ordered[:1], ordered), shares, where="post", label=name)
    axes.set(xlabel=label, ylim=(0, 1.02))
    if any(len(values) for values in samples.values()):
        axes.set_xscale("log")
    axes.grid(alpha=0.3)


def _step(parts: dict[str, dict[str, float]]) -> Figure:
    figure = Figure((8, 1.6 + 0.5 * len(parts)), layout="constrained")
    axes = figure.add_subplot()
    labels = list(parts)
    left = np.zeros(len(labels))
    for part in parts[labels[0]]:
        widths = np.array([parts[label][part] for label in labels])
        axes.barh(labels, widths, left=left, label=part)
        left += widths
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds of a decoding step")
    figure.legend(loc="outside lower center", ncols=len(parts[labels[0]]), fontsize="small")
    return figure


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=_DPI)
    return path
