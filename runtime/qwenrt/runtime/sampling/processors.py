"""Work on one row of logits or weights: penalties, the most likely tokens, the nucleus, the draw.

No step sorts the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

_GROUPS = 1024
"""Into so many interleaved groups the vocabulary is split to bound its k-th largest element from below."""
_SMALL = 512
"""Arrays up to this length are sorted outright."""
_DRAW_BLOCK = 512


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
    return _above_and_first(values, kth, k - int(np.count_nonzero(values > kth)))


def _above_and_first(values: Floats, cut: np.float32, ties: int) -> Indices:
    """Ascending indices of what is above `cut` and of the first `ties` that equal it."""
    kept = values >= cut
    level = (values == cut).nonzero()[0]
    if len(level) > ties:
        kept[level[ties:]] = False
    indices: Indices = kept.nonzero()[0]
    return indices


def nucleus(weights: Floats, top_p: float) -> Indices:
    """Ascending indices of the fewest largest of `weights` that sum to at least `top_p` of all; of equal ones the first.

    `weights` are not negative and not all zero. Takes time linear in their number.
    """
    total = float(weights.sum(dtype=np.float64))
    kept, picked = None, weights
    if len(weights) > _SMALL:
        # What is lighter than this sums to less than 1 - top_p of all, so the nucleus lies in the rest.
        kept = (weights >= (1.0 - top_p) * total / len(weights)).nonzero()[0]
        picked = weights[kept]
    cut, ties = _nucleus_cut(picked, top_p * total)
    nucleus = _above_and_first(picked, cut, ties)
    return nucleus if kept is None else kept[nucleus]


def _nucleus_cut(weights: Floats, mass: float) -> tuple[np.float32, int]:
    """The smallest weight in the fewest largest weights that sum to `mass`, and how many of that weight are among them."""
    while len(weights) > _SMALL:
        pivot = np.partition(weights, len(weights) // 2)[len(weights) // 2]
        above = weights[weights > pivot]
        mass_above = float(above.sum(dtype=np.float64))
        if mass_above >= mass:
            weights = above
            continue
        level = int(np.count_nonzero(weights == pivot))
        if mass_above + level * float(pivot) >= mass or level + len(above) == len(weights):
            return pivot, _at_least(mass - mass_above, float(pivot), level)
        mass -= mass_above + level * float(pivot)
        weights = weights[weights < pivot]
    ordered = np.sort(weights)[::-1]
    sums = np.cumsum(ordered, dtype=np.float64)
    last = min(int(np.searchsorted(sums, mass)), len(ordered) - 1)
    return ordered[last], last + 1 - int(np.count_nonzero(ordered > ordered[last]))


def _at_least(mass: float, weight: float, most: int) -> int:
    """How many of `weight` make `mass`: at least one, at most `most`."""
    return most if weight == 0.0 else min(most, max(1, int(np.ceil(mass / weight))))


def draw(weights: Floats, uniform: float) -> int:
    """Index drawn with probability proportional to `weights` (not negative, not all zero) by inverting their sum at `uniform`.

    The order is that of the indices, so weights that differ in their last bits give another index only at the very edge of one.
    """
    if len(weights) <= _DRAW_BLOCK:
        sums = np.cumsum(weights, dtype=np.float64)
        return _first_above(sums, uniform * float(sums[-1]))
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _DRAW_BLOCK), dtype=np.float64))
    target = uniform * float(sums[-1])
    block = _first_above(sums, target)
    first = block * _DRAW_BLOCK
    if block:
        target -= float(sums[block - 1])
    return first + _first_above(np.cumsum(weights[first : first + _DRAW_BLOCK], dtype=np.float64), target)


def _first_above(sums: npt.NDArray[np.float64], target: float) -> int:
    """First index whose running sum exceeds `target`; rounding at the end never gives an index that adds nothing."""
    index = int(np.searchsorted(sums, target, side="right"))
    return index if index < len(sums) else int(np.searchsorted(sums, sums[-1]))
