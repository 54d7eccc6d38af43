"""A layer's KV pool after a step against the reference's, slot by slot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qwenrt.plugins.reference import kv_values

from .batches import Batch
from .feeds import Array, Places
from .metrics import Deviation, deviation
from .results import Check

PARTS = ("K", "V")


@dataclass(frozen=True)
class PoolErrors:
    """What differs in one layer's pool: the keys and values that the step wrote, and slots that it should have left alone."""

    parts: dict[str, Deviation]
    """Of "K" and "V": a row is one head's vector of one new token."""
    where: dict[str, str]
    """The place of the worst vector of each part."""
    hint: str
    """What the pattern of the differences points to; empty where there is none."""
    stray: str
    """A slot that was changed though no token of the step belongs there; empty if there is none."""


def compare_pools(
    actual: Array, expected: Array, before: Array, feed: Mapping[str, Array], block_size: int, tolerance: float
) -> PoolErrors:
    """Compare a pool [num_blocks, 2, Hkv, block_size, kv_row] after a step with the reference's; both were given `before`.

    tolerance: above which relative error a vector counts as different when the pattern is looked at.
    """
    if actual.shape != expected.shape:
        bad = deviation(actual, expected)
        return PoolErrors(dict.fromkeys(PARTS, bad), dict.fromkeys(PARTS, ""), "", "")
    places = Places(feed, block_size)
    tokens = _Tokens(places)
    stray = _stray(actual, before, tokens)
    if actual.dtype == np.int8:
        actual, expected, before = kv_values(actual), kv_values(expected), kv_values(before)
    got, want = tokens.take(actual), tokens.take(expected)
    parts = {part: deviation(got[:, index], want[:, index]) for index, part in enumerate(PARTS)}
    where = {part: tokens.name(found, actual.shape[2]) for part, found in parts.items()}
    return PoolErrors(
        parts=parts,
        where=where,
        hint=_hint(tokens, parts, actual, got, want, before, tolerance),
        stray=stray,
    )


def pool_checks(
    actual: Array,
    expected: Array,
    layer: int,
    batch: Batch,
    block_size: int,
    limit: float,
    *,
    name: str,
    part: str = "",
) -> list[Check]:
    """The checks of one layer's pool after a step: K, V, and slots that were written where nothing should be.

    name: what the pool is called in them; part: the part of the graph whose own error they show.
    """
    found = compare_pools(actual, expected, batch.feed[f"kv_cache.{layer}"], batch.feed, block_size, limit)
    checks = []
    for key in PARTS:
        result = found.parts[key]
        hint = "" if result.error <= limit else found.hint
        where = ", ".join(filter(None, (f"batch {batch.name}", found.where[key])))
        note = "; ".join(filter(None, (result.note, hint)))
        checks.append(Check(f"{name} {key}", result.error, limit, where, note, part))
    if found.stray:
        where = f"batch {batch.name}, {found.stray}"
        checks.append(Check(f"{name} slots", math.inf, 0.0, where, part=part))
    return checks


class _Tokens:
    """The tokens that a step writes, and their slots."""

    def __init__(self, places: Places) -> None:
        self.sequences, self.positions = places.sequences[places.new], places.positions[places.new]
        self.blocks, self.slots = places.blocks[places.new], places.slots[places.new]

    def take(self, pool: Array) -> Array:
        """Their vectors, [N, 2, Hkv, D]."""
        taken: Array = pool[self.blocks, :, :, self.slots]
        return taken

    def name(self, found: Deviation, num_kv_heads: int) -> str:
        """The token and head of the worst row of [N, Hkv, D]."""
        if found.row is None:
            return ""
        token, head = divmod(found.row, num_kv_heads)
        return (
            f"sequence {self.sequences[token]}, position {self.positions[token]} (block {self.blocks[token]}, "
            f"slot {self.slots[token]}), key/value head {head}"
        )


def _stray(actual: Array, before: Array, tokens: _Tokens) -> str:
    bytes_differ = np.not_equal(actual.view(np.uint8), before.view(np.uint8)).reshape(*actual.shape, -1)
    changed = np.asarray(bytes_differ.any((1, 2, 4, 5)))
    changed[tokens.blocks, tokens.slots] = False
    if not changed.any():
        return ""
    block, slot = np.argwhere(changed)[0]
    return f"block {block}, slot {slot} was written, and no token of this step belongs there"


def _hint(
    tokens: _Tokens,
    parts: Mapping[str, Deviation],
    actual: Array,
    got: Array,
    want: Array,
    before: Array,
    tolerance: float,
) -> str:
    """What the pattern of the differences points to."""
    key, value = parts["K"].error > tolerance, parts["V"].error > tolerance
    if (not key and not value) or not all(part.finite for part in parts.values()):
        return ""
    bad = np.asarray(_vectors_off(got, want, tolerance).any((1, 2)))
    token = int(bad.argmax())
    unwritten = tokens.take(before)[bad]
    elsewhere = _found_elsewhere(tokens, token, actual, want[token], tolerance)
    if elsewhere is not None:
        return _misplaced(tokens, token, *elsewhere)
    if np.array_equal(got[bad], unwritten):
        return "these slots were never written"
    if key and not value:
        return "V agrees, so the slots and the projection are right: " + _rotation_hint(tokens, got, want, tolerance)
    return ""


def _rotation_hint(tokens: _Tokens, got: Array, want: Array, tolerance: float) -> str:
    """RoPE leaves position 0 as it is; the norm of k does not."""
    bad = np.asarray(_vectors_off(got, want, tolerance)[:, 0].any(1))
    start = tokens.positions == 0
    if not start.any():
        return "look at k_norm, and at RoPE's base, scaling and positions"
    if not bad[start].any():
        return "position 0 agrees too, which RoPE leaves as it is: look at RoPE's base, scaling and positions"
    return "position 0 differs too, which RoPE leaves as it is: look at k_norm and its epsilon"


def _vectors_off(got: Array, want: Array, tolerance: float) -> npt.NDArray[np.bool_]:
    """[N, 2, Hkv] which vectors are off by more than the tolerance."""
    difference = np.abs(got.astype(np.float32) - want.astype(np.float32)).max(-1)
    off: npt.NDArray[np.bool_] = ~(difference <= tolerance * np.abs(want.astype(np.float32)).max(-1))
    return off


def _found_elsewhere(
    tokens: _Tokens, token: int, actual: Array, want: Array, tolerance: float
) -> tuple[int, int] | None:
    """The block and slot that hold a token's vectors [2, Hkv, D] in place of its own; of several the nearest one."""
    pool = actual.astype(np.float32).transpose(0, 3, 1, 2, 4)
    scale = max(float(np.abs(want.astype(np.float32)).max()), 1e-30)
    distance = np.abs(pool - want.astype(np.float32)).max((2, 3, 4)) / scale
    own_block, own_slot = int(tokens.blocks[token]), int(tokens.slots[token])
    found = [(int(block), int(slot)) for block, slot in np.argwhere(distance <= tolerance)]
    others = [place for place in found if place != (own_block, own_slot)]
    return min(others, key=lambda place: (place[0] != own_block, abs(place[1] - own_slot)), default=None)


def _misplaced(tokens: _Tokens, token: int, block: int, slot: int) -> str:
    own_block, own_slot = int(tokens.blocks[token]), int(tokens.slots[token])
    where = f"sequence {tokens.sequences[token]}, position {tokens.positions[token]} is in block {block}, slot {slot}"
    if block == own_block:
        off = slot - own_slot
        return f"written {abs(off)} slot{'s' if abs(off) > 1 else ''} {'further' if off > 0 else 'before'}: {where}"
    return f"written to another block: {where}, and belongs in block {own_block}, slot {own_slot}"
