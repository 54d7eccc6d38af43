"""The comparison as tables on the terminal."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import printable
from .results import Check, Comparison, number

_MOST_FAILURES = 8


def print_comparison(result: Comparison, *, layers: bool) -> None:
    """Print what was found to stdout; layers: each of them."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    with console.capture() as capture:
        console.print(Text(f"{printable(result.engine)} on {result.backend}: {result.formats}", "bold"))
        console.print(Text(f"against {printable(result.reference)}"), "", sep="\n")
        console.print(_checks(result))
        if layers and result.layers:
            console.print("", _layers(result), sep="\n")
        if result.divergences:
            console.print("", _divergences(result), sep="\n")
        for line in ["", *_facts(result)]:
            console.print(Text(printable(line)), soft_wrap=True)
        for check in result.failures[:_MOST_FAILURES]:
            console.print(Text(printable(f"FAIL {check.description}"), "red"), soft_wrap=True)
        if len(result.failures) > _MOST_FAILURES:
            console.print(f"and {len(result.failures) - _MOST_FAILURES} more checks failed; --json has them all")
        verdict = Text(printable(result.verdict), "bold green" if result.passed else "bold red")
        console.print(verdict, soft_wrap=True)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0))


def _checks(result: Comparison) -> Table:
    """The engine as a whole; KV pools in two lines, the worst of all layers."""
    table = _table("measure", "worst", "at most", "", "where")
    rows = [check for check in result.checks if not check.part]
    pools = [check for check in rows if check.measure.startswith("KV cache")]
    others = [check for check in rows if check not in pools]
    shown = [*others[:3], *(_worst(pools, part) for part in ("K", "V", "slots") if _worst(pools, part)), *others[3:]]
    for check in shown:
        if check is not None:
            state = Text("ok", "green") if check.passed else Text("FAIL", "red")
            where = "; ".join(filter(None, (check.where, check.note)))
            table.add_row(check.measure, number(check.value), number(check.limit), state, Text(printable(where)))
    return table


def _worst(pools: list[Check], part: str) -> Check | None:
    return max(
        (check for check in pools if check.measure.endswith(f" {part}")), key=lambda check: check.value, default=None
    )


def _layers(result: Comparison) -> Table:
    tensors = list(dict.fromkeys(name for part in result.layers for name in part.own))
    table = _table("by itself", *tensors, "all so far")
    limits = {name: result.tolerances["layer" if name == "output" else "kv"] for name in tensors}
    for part in result.layers:
        cells = []
        for name in tensors:
            limit = result.tolerances["logits"] if part.name == "head" else limits[name]
            value = part.own.get(name)
            cells.append(Text("") if value is None else Text(number(value), "" if value <= limit else "red"))
        table.add_row(part.name, *cells, number(part.accumulated))
    return table


def _divergences(result: Comparison) -> Table:
    table = _table("greedy tokens after", "the same", "then the engine", "the reference", "margin")
    for one in result.divergences:
        prompt = Text(printable(one.prompt.strip().split("\n")[0][:40]))
        if one.position is None:
            table.add_row(prompt, f"all {one.num_tokens}")
        else:
            engine, reference = (Text(printable(token)) for token in (one.engine_token, one.reference_token))
            table.add_row(prompt, f"{one.position} of {one.num_tokens}", engine, reference, number(one.margin))
    return table


def _facts(result: Comparison) -> list[str]:
    lines = list(result.notes)
    if (perplexity := result.perplexity) is not None:
        lines.append(
            f"perplexity of {perplexity.num_tokens} tokens: engine {perplexity.engine:.4f} ± {perplexity.engine_error:.4f}, "
            f"reference {perplexity.reference:.4f} ± {perplexity.reference_error:.4f}, difference "
            f"{perplexity.nll_difference:+.2e} ± {perplexity.nll_difference_error:.1e} nats a token"
        )
    if (found := result.bisection) is not None:
        lines.append(
            f"bisected {found.part}: {found.last_good} is right, {found.tensor} is the first value that is not, by "
            f"{number(found.error)} (at most {number(found.budget)}): {found.where}; at fault: {', '.join(found.nodes)}"
        )
    return lines
