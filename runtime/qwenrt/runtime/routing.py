"""Which of several replicas gets a request: functions of counters alone, for whoever keeps the counters.

A replica's counter is its outstanding tokens: those of prompts and answers of the requests that it was given and has not ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from .prefix_cache import extend_block_hashes

PREFIX_BLOCKS = 4
"""Blocks of a prompt that say where it goes, unless told otherwise."""
_HOMES = 3
"""Replicas that may serve one prefix before a request goes wherever there is least to do."""


def least_outstanding(outstanding: Sequence[int]) -> int:
    """The replica with the fewest outstanding tokens, the first of several."""
    return outstanding.index(min(outstanding))


def prefix_key(token_ids: Sequence[int], block_size: int, blocks: int = PREFIX_BLOCKS) -> bytes | None:
    """The prefix cache's own hash of a prompt's first `blocks` full blocks, fewer if it is shorter; None if it fills none."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids[: blocks * block_size], block_size)
    return hashes[-1] if hashes else None


def by_prefix(key: bytes | None, outstanding: Sequence[int], max_imbalance: int) -> int:
    """The replica that `key` is at home at, unless it has over `max_imbalance` tokens more to do than the least busy one.

    Then the key's second home, then its third: what many ask for at once spreads over a few caches, not over all. Then, and
    without a key, the least busy one.
    """
    if key is not None:
        most = min(outstanding) + max_imbalance
        seed = int.from_bytes(key[:8], "little")
        for attempt in range(_HOMES):
            replica = jump_hash(seed + attempt * 0x9E3779B97F4A7C15, len(outstanding))
            if outstanding[replica] <= most:
                return replica
    return least_outstanding(outstanding)


def jump_hash(key: int, buckets: int) -> int:
    """A bucket from 0 to `buckets` - 1; when one bucket is added, only a 1 / (buckets + 1) share of all keys moves, to it.

    J. Lamping, E. Veach, "A fast, minimal memory, consistent hash algorithm", 2014.
    """
    bucket, following = -1, 0
    while following < buckets:
        bucket = following
        key = (key * 2862933555777941757 + 1) % 2**64
        following = int((bucket + 1) * (2**31 / ((key >> 33) + 1)))
    return bucket
