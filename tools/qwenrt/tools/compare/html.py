"""The comparison as one HTML file with nothing outside it: no scripts, no fonts, plots as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from .plots import divergence_by_position, error_by_layer, error_by_node, logit_histogram
from .results import Comparison, number


def to_html(results: Sequence[Comparison]) -> str:
    """The report on an engine against one or several references."""
    template = resources.files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    comparisons = [(result, _plots(result)) for result in results]
    return environment.from_string(template).render(
        engine=results[0].engine, passed=all(result.passed for result in results), comparisons=comparisons
    )


def _plots(result: Comparison) -> dict[str, Any]:
    """Title and SVG of the plots that there is data for."""
    plots = {}
    if result.layers:
        plots["Error by layer, each given the reference's input"] = error_by_layer(result)
    if result.bisection is not None:
        plots[f"Error inside {result.bisection.part}"] = error_by_node(result.bisection)
    if result.logits:
        plots["Errors of the logits"] = logit_histogram(result)
    if result.logits or result.divergences:
        plots["Divergence over positions"] = divergence_by_position(result)
    return {title: Markup(svg) for title, svg in plots.items()}
