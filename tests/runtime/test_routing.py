"""Where a request goes, from counters alone."""

from __future__ import annotations

import random
from collections import Counter

from qwenrt.runtime.routing import by_prefix, jump_hash, least_outstanding, prefix_key


def test_the_least_busy_replica_is_the_first_with_the_smallest_counter() -> None:
    assert least_outstanding([7, 3, 9, 3]) == 1


def test_prompts_of_the_same_first_blocks_have_the_same_key_and_others_have_not() -> None:
    start = list(range(8))
    assert prefix_key([*start, 1, 2], 4, blocks=2) == prefix_key([*start, 3, 4, 5, 6], 4, blocks=2)
    assert prefix_key([*start, 1], 4, blocks=2) != prefix_key([9, *start], 4, blocks=2)
    assert prefix_key(start[:7], 4, blocks=2) == prefix_key([*start[:4], 9], 4, blocks=2)
    assert prefix_key([1, 2, 3], 4) is None


def test_a_prefix_stays_at_home_until_home_is_too_busy() -> None:
    key = prefix_key(list(range(64)), 4)
    outstanding = [0] * 10
    home = by_prefix(key, outstanding, 100)
    outstanding[home] = 100
    assert by_prefix(key, outstanding, 100) == home
    outstanding[home] = 101
    assert by_prefix(key, outstanding, 100) != home


def test_a_prefix_that_everybody_asks_for_spreads_over_its_few_homes_before_all_others() -> None:
    key = prefix_key(list(range(64)), 4)
    outstanding = [0] * 100
    for _ in range(22):
        outstanding[by_prefix(key, outstanding, 100)] += 10
    assert sum(count > 10 for count in outstanding) <= 3
    for _ in range(1000):
        outstanding[by_prefix(key, outstanding, 100)] += 10
        assert max(outstanding) <= min(outstanding) + 110
    assert min(outstanding) > 0


def test_without_a_key_the_least_busy_replica_is_taken() -> None:
    assert by_prefix(None, [5, 4, 6], 1000) == 1


def test_keys_spread_evenly_and_few_move_when_a_replica_comes() -> None:
    rng = random.Random(3)
    keys = [rng.getrandbits(64) for _ in range(20_000)]
    before = [jump_hash(key, 20) for key in keys]
    counts = Counter(before)
    assert len(counts) == 20
    assert max(counts.values()) < 1.2 * min(counts.values())
    moved = [(old, new) for old, new in zip(before, (jump_hash(key, 21) for key in keys), strict=True) if old != new]
    assert all(new == 20 for _, new in moved)
    assert 0.03 < len(moved) / len(keys) < 0.065
