"""Perplexity of a text, engine against reference, over a sliding window.

Windows of W tokens start every W / 2 tokens; of each window but the first only the second half counts, so that every token is
predicted once, from at least W / 2 tokens before it. Both models see the same windows, which makes the difference of their
log-likelihoods far more certain than either of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

from .metrics import log_softmax
from .results import Check, Perplexity
from .runners.base import PagedRunner
from .text_logits import logits_after
from .tolerances import Tolerance

Floats = npt.NDArray[np.float64]


def compare_perplexity(
    engine: PagedRunner,
    reference: PagedRunner,
    token_ids: Sequence[int],
    window: int,
    tolerance: Tolerance,
    progress: Callable[[str], None],
) -> tuple[Check, Perplexity]:
    """Score a text of at least two tokens under both; `window` is in tokens, at least 2."""
    if len(token_ids) < 2:
        raise ConfigError(f"the text for --perplexity has {len(token_ids)} tokens; it needs 2 at least")
    scores: list[list[Floats]] = [[], []]
    spans = list(_windows(len(token_ids), window))
    for number, (start, stop, first) in enumerate(spans, 1):
        progress(f"perplexity: window {number} of {len(spans)}")
        for runner, found in zip((engine, reference), scores, strict=True):
            found.append(negative_log_likelihoods(runner, token_ids[start:stop], first - start))
    ours, theirs = (np.concatenate(found) for found in scores)
    difference, error = _mean(ours - theirs)
    (engine_nll, engine_error), (reference_nll, reference_error) = _mean(ours), _mean(theirs)
    result = Perplexity(
        num_tokens=len(ours),
        engine=_exp(engine_nll),
        engine_error=_exp(engine_nll) * engine_error,
        reference=_exp(reference_nll),
        reference_error=_exp(reference_nll) * reference_error,
        nll_difference=difference,
        nll_difference_error=error,
    )
    where = f"{result.engine:.4f} against {result.reference:.4f}, {result.num_tokens} tokens"
    bad = int((~np.isfinite(ours)).sum())
    note = f"{bad} tokens have no finite likelihood" if bad else ""
    return Check("perplexity", math.inf if bad else abs(difference), tolerance.nll, where, note), result


def _windows(num_tokens: int, window: int) -> Iterator[tuple[int, int, int]]:
    """Start and end of each window, and the first token that is scored in it."""
    first = 1
    for start in range(0, num_tokens, max(1, window // 2)):
        stop = min(start + window, num_tokens)
        if first < stop:
            yield start, stop, first
        first = stop
        if stop == num_tokens:
            return


def negative_log_likelihoods(runner: PagedRunner, token_ids: Sequence[int], first: int) -> Floats:
    """-log p, in nats, of tokens `first` (1 or more) to the last, each given those before it."""
    targets = iter(token_ids[first:])
    found = [
        -log_softmax(row)[target]
        for logits in logits_after(runner, token_ids[:-1], first - 1)
        for row, target in zip(logits, targets, strict=False)
    ]
    return np.array(found)


def _mean(values: Floats) -> tuple[float, float]:
    """Mean and its standard error."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(values.mean()), float(error)


def _exp(value: float) -> float:
    """e to the value, inf where that is no number."""
    return math.exp(value) if value < 700 else math.inf
