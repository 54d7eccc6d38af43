"""The report's plots, as SVG text."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .results import HISTOGRAM_EDGES, Bisection, Comparison

_WIDTH, _HEIGHT = 8.5, 3.2
_FLOOR = 1e-10
"""What is drawn for an error of 0, and the ceiling for one without bound, on logarithmic axes."""
_CEILING = 1e3
_SETTINGS: Any = {
    # Text stays text, in the page's font, and the same data gives the same bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "qwenrt",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 9,
}


def error_by_layer(result: Comparison) -> str:
    """Each part's own errors by tensor, the errors carried along, and the tolerances."""
    figure, axes = _figure()
    names = [part.name for part in result.layers]
    tensors = list(dict.fromkeys(name for part in result.layers for name in part.own))
    for tensor in tensors:
        points = [(place, part.own[tensor]) for place, part in enumerate(result.layers) if tensor in part.own]
        axes.plot([place for place, _ in points], _drawn([value for _, value in points]), marker=".", label=tensor)
    carried = _drawn([part.accumulated for part in result.layers])
    axes.plot(range(len(names)), carried, color="0.5", linestyle=":", marker=".", label="all so far")
    for limit in {result.tolerances[name] for name in ("layer", "kv")}:
        names_of_limit = [name for name in ("layer", "kv") if result.tolerances[name] == limit]
        axes.axhline(limit, color="tab:red", linewidth=0.8, linestyle="--")
        axes.annotate(f"tolerance {', '.join(names_of_limit)}", (0, limit), fontsize=7, color="tab:red", va="bottom")
    axes.set_yscale("log")
    step = max(1, len(names) // 16)
    axes.set_xticks(range(0, len(names), step), [_short(name) for name in names[::step]])
    axes.set_ylabel("relative error")
    axes.legend(fontsize=7, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.15), frameon=False)
    return _svg(figure)


def logit_histogram(result: Comparison) -> str:
    """How large the absolute errors of all logits are."""
    figure, axes = _figure()
    counts = np.sum([one.histogram for one in result.logits], axis=0)
    axes.bar(HISTOGRAM_EDGES[:-1], counts, width=0.25, align="edge", edgecolor="white", linewidth=0.3)
    axes.set_yscale("symlog")
    axes.set_xlabel("log10 of the absolute error of a logit")
    axes.set_ylabel("logits")
    return _svg(figure)


def divergence_by_position(result: Comparison) -> str:
    """KL divergence of the next-token distribution along batches' sequences and generated texts."""
    figure, axes = _figure()
    for batch in result.logits:
        axes.plot(batch.positions, _drawn(batch.kl), ".", markersize=4, label=f"batch {batch.batch}")
    for number, text in enumerate(result.divergences, 1):
        line = axes.plot(_drawn(text.kl), linewidth=1, label=f"greedy {number}")[0]
        if text.position is not None:
            place = len(text.kl) - text.num_tokens + text.position
            axes.axvline(place, color=line.get_color(), linewidth=0.8, linestyle="--")
    axes.axhline(result.tolerances["kl"], color="tab:red", linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    axes.set_xlabel("position (dashed: the first token that the reference would not have chosen)")
    axes.set_ylabel("KL divergence, nats")
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.2), frameon=False)
    return _svg(figure)


def error_by_node(found: Bisection) -> str:
    """The errors of a bisected part's values, in the graph's order."""
    figure, axes = _figure()
    names = list(found.errors)
    figure.set_figheight(min(_HEIGHT, 1 + len(names) / 3))
    colors = ["tab:red" if name == found.tensor else "tab:blue" for name in names]
    axes.barh(range(len(names)), _drawn(list(found.errors.values())), color=colors, left=_FLOOR)
    axes.axvline(found.budget, color="tab:red", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("relative error")
    return _svg(figure)


def _figure() -> tuple[Figure, Axes]:
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure((_WIDTH, _HEIGHT), layout="constrained")
        return figure, figure.add_subplot()


def _svg(figure: Figure) -> str:
    """The figure as an <svg> element."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return re.sub(r"^.*?(?=<svg)", "", text, flags=re.DOTALL)


def _drawn(values: list[float]) -> list[float]:
    return [_CEILING if np.isnan(value) else min(max(value, _FLOOR), _CEILING) for value in values]


def _short(name: str) -> str:
    return name.removeprefix("layer ")
