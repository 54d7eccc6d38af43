"""One file per target: what the graph must look like for it, and which types it can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..weights import Array, Encoding, KeptEncoding


@dataclasses.dataclass(frozen=True)
class Lowered:
    """What a lowered graph holds beyond the model's parameters.

    computed: values of initializers that the lowering added; encodings: how parameters are stored as other initializers; kept:
    the same where these have the checkpoint's own values.
    """

    computed: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    encodings: Mapping[str, Encoding] = dataclasses.field(default_factory=dict)
    kept: Mapping[str, KeptEncoding] = dataclasses.field(default_factory=dict)
