"""The logits of a text, a step at a time, so that neither a long text nor a large vocabulary takes gigabytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from qwenrt.runtime import EngineManifest

from .batches import one_sequence
from .feeds import Array, kv_names
from .runners.base import PagedRunner

_MAX_LOGITS = 1 << 25
"""Values of a step's logits: 128 MiB in float32."""


def logits_after(runner: PagedRunner, token_ids: Sequence[int], first: int) -> Iterator[Array]:
    """The logits [rows, vocab] after token `first` and each that follows it, in steps; a text of at least `first` + 1 tokens."""
    manifest = runner.manifest
    size = _step_size(manifest)
    pools: dict[str, Array] | None = None
    for start in range(0, len(token_ids), size):
        stop = min(start + size, len(token_ids))
        feed = one_sequence(token_ids, manifest, start, stop, pools)
        rows = np.arange(max(first - start, 0), stop - start, dtype=np.int32)
        # A step without a row of logits is one that no runtime makes.
        feed["logits_indices"] = rows if rows.size else np.zeros(1, np.int32)
        wanted = [] if stop == len(token_ids) else [name.replace(".", "_out.") for name in kv_names(manifest)]
        outputs: dict[str, Array] = {}
        runner.visit(
            feed,
            [*wanted, "logits"] if rows.size else wanted,
            lambda name, values, outputs=outputs: outputs.update({name: values.copy()}),  # type: ignore[misc]
        )
        logits = outputs.pop("logits", None)
        pools = outputs
        if logits is not None:
            yield logits


def _step_size(manifest: EngineManifest) -> int:
    """Tokens of a step, all of whose logits may be wanted."""
    return max(1, min(manifest.limits.max_num_batched_tokens, _MAX_LOGITS // manifest.model.vocab_size))
