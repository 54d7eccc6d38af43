"""Whole steps against the reference: logits, and every layer's KV pool."""

from __future__ import annotations

import math

import numpy as np

from .batches import Batch
from .feeds import Array, row_place
from .kv import pool_checks
from .metrics import Distributions, deviation, distributions
from .results import HISTOGRAM_EDGES, Check, LogitErrors
from .runners.base import PagedRunner
from .tolerances import Tolerance


def compare_step(
    engine: PagedRunner, reference: PagedRunner, batch: Batch, tolerance: Tolerance
) -> tuple[list[Check], LogitErrors | None, dict[str, Array]]:
    """Run a batch through both and compare; also returns the reference's outputs, whose pools the next batch may start from.

    Of the engine's pools one at a time is in memory. An output that does not come is a failed check.
    """
    expected: dict[str, Array] = reference.infer(batch.feed)
    checks: list[Check] = []
    errors: list[LogitErrors] = []
    missing = set(engine.outputs)

    def visit(name: str, values: Array) -> None:
        missing.discard(name)
        if name == "logits":
            found, rows = compare_logits(values, expected[name], batch, tolerance)
            errors.extend(rows)
        else:
            layer = int(name.rsplit(".", 1)[1])
            title = f"KV cache, layer {layer}"
            block_size = engine.manifest.block_size
            found = pool_checks(values, expected[name], layer, batch, block_size, tolerance.kv, name=title)
        checks.extend(found)

    engine.visit(batch.feed, engine.outputs, visit)
    checks += [
        Check(name, math.inf, 0.0, f"batch {batch.name}", "the engine gave no such output") for name in sorted(missing)
    ]
    return checks, errors[0] if errors else None, expected


def compare_logits(
    actual: Array, expected: Array, batch: Batch, tolerance: Tolerance
) -> tuple[list[Check], list[LogitErrors]]:
    """The checks of one batch's logits [R, vocab], and their errors row by row, none if there are no numbers to compare."""
    result = deviation(actual, expected)
    rows = batch.feed["logits_indices"]
    where = (
        f"batch {batch.name}"
        if result.row is None
        else f"batch {batch.name}, {row_place(batch.feed, rows[result.row])}"
    )
    if result.column is not None:
        where += f", token {result.column}"
    checks = [Check("logits", result.error, tolerance.logits, where, result.note)]
    if not math.isfinite(result.error) or not actual.size:
        return checks, []
    spread = distributions(actual, expected)
    worst = int(spread.kl.argmax())
    checks.append(
        Check(
            "KL divergence",
            float(spread.kl[worst]),
            tolerance.kl,
            f"batch {batch.name}, {row_place(batch.feed, rows[worst])}",
        )
    )
    checks.append(_top1_check(spread, expected, batch, tolerance))
    logs = np.log10(np.maximum(np.abs(actual - expected), 10.0 ** HISTOGRAM_EDGES[0]))
    histogram, _ = np.histogram(np.clip(logs, HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1]), HISTOGRAM_EDGES)
    errors = LogitErrors(
        batch=batch.name,
        positions=[int(batch.feed["positions"][row]) for row in rows],
        kl=[float(value) for value in spread.kl],
        top1=float(spread.top1.mean()),
        top5=float(spread.top5.mean()),
        max_abs=result.max_abs,
        cosine_distance=result.cosine_distance,
        histogram=[int(count) for count in histogram],
    )
    return checks, [errors]


def _top1_check(spread: Distributions, expected: Array, batch: Batch, tolerance: Tolerance) -> Check:
    """The most likely token may be another one only where the reference has both for about equally likely.

    The measure is how far the reference holds its own token above the engine's, relative to the row's largest logit; an error of
    one tolerance on either token explains twice the tolerance.
    """
    margins = relative_margins(spread.margin, expected)
    worst = int(margins.argmax())
    place = row_place(batch.feed, batch.feed["logits_indices"][worst])
    where = f"batch {batch.name}, {place}" if margins[worst] > 0 else ""
    share = f"the same token in {int(spread.top1.sum())} of {len(spread.top1)} rows"
    return Check("most likely token", float(margins[worst]), 2 * tolerance.logits, where, share)


def relative_margins(margins: Array, expected: Array) -> Array:
    """Margins between logits relative to the largest logit of each row of `expected`."""
    relative: Array = margins / np.maximum(np.abs(expected).max(1), 1e-30)
    return relative


def worst_checks(checks: list[Check]) -> list[Check]:
    """Of all checks of one measure, the one that is furthest over, or least under, its limit; in the order of appearance."""
    worst: dict[str, Check] = {}
    for check in checks:
        known = worst.get(check.measure)
        if known is None or _rank(check) > _rank(known):
            worst[check.measure] = check
    return list(worst.values())


def _rank(check: Check) -> float:
    return math.inf if math.isnan(check.value) else check.value / max(check.limit, 1e-30)
