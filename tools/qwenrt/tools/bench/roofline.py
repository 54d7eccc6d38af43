"""The least time that a step can take on a machine: its bytes at the speed of memory, or its products at that of the units.

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore architectures", 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from qwenrt.runtime import EngineDir
from qwenrt.runtime.backends import Backend
from qwenrt.runtime.model_runner import StepInputs


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates with all threads, in bytes and operations a second (a multiply-add is two)."""

    read: float
    float32: float
    int8: float


@dataclass(slots=True)
class Step:
    """What a step has to read and multiply at least."""

    sequences: int
    tokens: int
    bytes: int
    linear_ops: int
    attention_ops: int

    def least_seconds(self, machine: Machine, *, integer: bool) -> tuple[float, float]:
        """Seconds for the bytes and seconds for the products; the step takes no less than the longer of them."""
        products = self.linear_ops / (machine.int8 if integer else machine.float32)
        return self.bytes / machine.read, products + self.attention_ops / machine.float32


class CostModel:
    """The bytes and products of an engine's steps.

    Each step reads every weight that its tokens use once (with experts: no more than one token uses), and K and V of each
    sequence's context once; a multiply-add for every such weight and token, lm_head's for wanted rows alone, and for attention
    2 * num_heads * head_dim a layer for each pair of a token and one that it sees. Activations are taken to stay in caches.
    """

    def __init__(self, folder: EngineDir) -> None:
        manifest, model = folder.manifest, folder.manifest.model
        head = model.vocab_size * model.hidden_size
        gathered = 0 if model.tie_word_embeddings else head
        used = model.num_active_parameters - gathered
        self.weight_bytes = round(used / model.num_parameters * manifest.files["model.safetensors"].size)
        self.integer = manifest.weights == "checkpoint" or manifest.weights.startswith("int")
        self._kv_bytes = manifest.kv_bytes_per_token
        self._ops_per_token = 2 * (used - head)
        self._ops_per_row = 2 * head
        self._ops_per_pair = 4 * model.num_layers * model.num_heads * model.head_dim

    def step(self, inputs: StepInputs) -> Step:
        """What a step of these inputs costs."""
        counts = np.diff(inputs.query_start)
        lengths = inputs.seq_lens.astype(np.int64)
        # A sequence's last `count` tokens see length - count + 1, ..., length tokens.
        pairs = int((counts * (2 * lengths - counts + 1) // 2).sum())
        tokens = len(inputs.input_ids)
        return Step(
            sequences=len(counts),
            tokens=tokens,
            bytes=self.weight_bytes + self._kv_bytes * int(lengths.sum()),
            linear_ops=self._ops_per_token * tokens + self._ops_per_row * len(inputs.logits_indices),
            attention_ops=self._ops_per_pair * pairs,
        )


class Recorder:
    """A backend that passes steps on to another and keeps what the last one cost at least."""

    def __init__(self, backend: Backend, costs: CostModel) -> None:
        self._backend = backend
        self._costs = costs
        self.last: Step

    def execute(self, inputs: StepInputs) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """As Backend.execute."""
        self.last = self._costs.step(inputs)
        return self._backend.execute(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)
