"""Work on one row of logits: penalties."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Penalties:
    """Repetition, frequency and presence penalty of one sequence; a step costs time in the tokens seen, not in the vocabulary.

    Repetition counts tokens of the prompt and the output, the other two those of the output alone.
    """

    def __init__(
        self, prompt_token_ids: Iterable[int], *, repetition: float, frequency: float, presence: float
    ) -> None:
        self._repetition = np.float32(repetition)
        self._frequency = np.float32(frequency)
        self._presence = np.float32(presence)
        seen = dict.fromkeys(prompt_token_ids) if repetition != 1.0 else {}
        self._slots = {token_id: slot for slot, token_id in enumerate(seen)}
        self._ids = np.fromiter(seen, dtype=np.int64, count=len(seen))
        self._counts = np.zeros(len(seen), dtype=np.float32)

    def record(self, token_id: int) -> None:
        """Count a generated token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def apply(self, logits: Floats) -> None:
        """Penalise `logits` [vocab] in place."""
        ids, counts = self._ids[: len(self._slots)], self._counts[: len(self._slots)]
        values = logits[ids]
        if self._repetition != 1:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts
        values -= self._presence * (counts > 0)
        logits[ids] = values
