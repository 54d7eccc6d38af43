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
from qwenrt.runtime import EngineManifest

from .batches import one_sequence
from .feeds import Array, kv_names
from .metrics import log_softmax
from .results import Check, Perplexity
from .runners.base import PagedRunner
from .tolerances import Tolerance

_MAX_LOGITS = 1 << 25
"""Values of a step's logits, so that a large vocabulary does not take gigabytes."""

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
    """-log p, in nats, of tokens `first` (1 or more) to the last, each given those before it; computed in steps."""
    manifest = runner.manifest
    chunk = _chunk(manifest)
    targets = np.array(token_ids[1:])
    found: list[Floats] = []
    pools: dict[str, Array] | None = None
    for start in range(0, len(targets), chunk):
        stop = min(start + chunk, len(targets))
        feed = one_sequence(token_ids, manifest, start, stop, pools)
        outputs: dict[str, Array] = {}
        last = stop == len(targets)
        wanted = ["logits"] if last else ["logits", *(name.replace(".", "_out.") for name in kv_names(manifest))]
        runner.visit(feed, wanted, lambda name, values, outputs=outputs: outputs.update({name: values.copy()}))  # type: ignore[misc]
        logits = outputs.pop("logits")
        rows = zip(logits, targets[start:stop], strict=True)
        found.append(np.array([-log_softmax(row)[target] for row, target in rows]))
        pools = outputs
    return np.concatenate(found)[first - 1 :]


def _chunk(manifest: EngineManifest) -> int:
    """Tokens of a step, all of whose logits are wanted."""
    return max(1, min(manifest.limits.max_num_batched_tokens, _MAX_LOGITS // manifest.model.vocab_size))


def _mean(values: Floats) -> tuple[float, float]:
    """Mean and its standard error."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(values.mean()), float(error)


def _exp(value: float) -> float:
    """e to the value, inf where that is no number."""
    return math.exp(value) if value < 700 else math.inf
