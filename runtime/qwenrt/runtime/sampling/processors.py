"""Work on one row of logits: penalties, the most likely tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

_GROUPS = 1024
"""Into so many interleaved groups the vocabulary is split to bound its k-th largest element from below."""


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


def largest(values: Floats, k: int) -> Indices:
    """Ascending indices of the `k` largest of `values`, of equal ones the first; all if there are no more than `k`. No NaN."""
    n = len(values)
    if k >= n:
        return np.arange(n)
    if k < _GROUPS and n > 4 * _GROUPS:
        # Each of k groups has an element no smaller than the k-th largest group maximum, so that bounds the k-th largest element.
        tops = values[: n - n % _GROUPS].reshape(-1, _GROUPS).max(axis=0)
        candidates = (values >= np.partition(tops, _GROUPS - k)[_GROUPS - k]).nonzero()[0]
        chosen: Indices = candidates[_largest(values[candidates], k)]
        return chosen
    return _largest(values, k)


def _largest(values: Floats, k: int) -> Indices:
    kth = np.partition(values, len(values) - k)[len(values) - k]
    kept = values >= kth
    level = (values == kth).nonzero()[0]
    ties = k - int(np.count_nonzero(values > kth))
    if len(level) > ties:
        kept[level[ties:]] = False
    indices: Indices = kept.nonzero()[0]
    return indices
