"""How far an engine may be from the reference: one table, by what it computes in and how weights and KV cache are stored.

A tolerance is the sum of three rows: the arithmetic's, the weight format's, the KV cache's. Errors of tensors are relative to the
largest value of their row (`metrics`). The numbers are about four times what the tests' random-weight shapes and the demo
checkpoint show, so that an engine that is right passes and one wrong weight, norm or head does not; those of integer weights
about twice what random weights of the 0.6B shape show, whose rows are the longest and whose layers add up the most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from qwenrt.plugins import ConfigError
from qwenrt.runtime import EngineManifest


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The most that each measure may be."""

    layer: float
    """Relative error of a tensor in a layer, given the reference's input to the layer."""
    kv: float
    """Relative error of a key or value vector of one head after a step; also of attention's result, head by head."""
    logits: float
    """Relative error of a row of logits."""
    kl: float
    """KL divergence of a next-token distribution from the reference's, in nats."""
    nll: float
    """Difference of the mean negative log-likelihoods of a text, in nats a token."""

    def __add__(self, other: Tolerance) -> Tolerance:
        return Tolerance(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


_NONE = Tolerance(0, 0, 0, 0, 0)
_ARITHMETIC = {
    "float32": Tolerance(layer=1e-4, kv=1e-4, logits=1e-3, kl=1e-5, nll=1e-4),
    "float16": Tolerance(layer=5e-3, kv=1e-2, logits=2e-2, kl=1e-3, nll=2e-3),
    "bfloat16": Tolerance(layer=4e-2, kv=8e-2, logits=1e-1, kl=2e-2, nll=1e-2),
}
_WEIGHTS = {
    "float32": _NONE,
    "float16": Tolerance(layer=1e-3, kv=4e-3, logits=4e-3, kl=1e-4, nll=2e-4),
    "bfloat16": Tolerance(layer=1e-2, kv=3e-2, logits=3e-2, kl=4e-3, nll=2e-3),
    "fp8": Tolerance(layer=6e-2, kv=2e-1, logits=2e-1, kl=1e-1, nll=5e-2),
    "int8": Tolerance(layer=1.2e-1, kv=2.5e-1, logits=1.5e-1, kl=4e-1, nll=2e-2),
    # Nothing is lost of the weights, but as with int8 activations are rounded.
    "checkpoint": Tolerance(layer=1.2e-1, kv=2.5e-1, logits=1.5e-1, kl=4e-1, nll=2e-2),
    # A sharp distribution on text that a model never saw goes anywhere: 4 bits say little about the divergence of the worst row.
    "int4": Tolerance(layer=5e-1, kv=1.2, logits=8e-1, kl=1e1, nll=2e-1),
    "int4-g64": Tolerance(layer=5.5e-1, kv=1.3, logits=9e-1, kl=1e1, nll=3e-1),
    "int4-g128": Tolerance(layer=6e-1, kv=1.4, logits=1.0, kl=1e1, nll=4e-1),
}
_KV_CACHE = {
    "float32": _NONE,
    "float16": Tolerance(layer=3e-3, kv=4e-3, logits=4e-3, kl=1e-4, nll=2e-4),
    "bfloat16": Tolerance(layer=4e-3, kv=2e-2, logits=2e-2, kl=2e-3, nll=1e-3),
    "fp8": Tolerance(layer=4e-2, kv=1.5e-1, logits=1.5e-1, kl=5e-2, nll=2e-2),
    "int8": Tolerance(layer=1e-1, kv=2e-1, logits=2.5e-1, kl=2e-1, nll=2e-2),
}


def tolerance_for(
    manifest: EngineManifest, checkpoint_dtypes: frozenset[str] | None, reference_dtype: str = "float32"
) -> Tolerance:
    """The tolerance of an engine against a reference that computes in `reference_dtype`.

    checkpoint_dtypes: how the checkpoint stores its weights, where the reference is the checkpoint: an engine that stores them
    the same way has lost nothing, and gets nothing allowed for it. None where the reference has the engine's own weights.
    """
    parts = {"dtype": _ARITHMETIC, "weights": _WEIGHTS, "kv_dtype": _KV_CACHE}
    rows = []
    for field, table in parts.items():
        value = getattr(manifest, field)
        if value not in table:
            raise ConfigError(f"no tolerance is known for {field} {value!r}; known are {', '.join(table)}")
        exact = field == "weights" and checkpoint_dtypes in (None, frozenset({value}))
        rows.append(_NONE if exact else table[value])
    return rows[0] + rows[1] + rows[2] + (_NONE if reference_dtype == "float32" else _ARITHMETIC[reference_dtype])


def overridden(tolerance: Tolerance, values: Mapping[str, float]) -> Tolerance:
    """The tolerance with some of its values replaced."""
    return dataclasses.replace(tolerance, **values)


NAMES = tuple(field.name for field in dataclasses.fields(Tolerance))
