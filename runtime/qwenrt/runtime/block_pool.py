"""The KV blocks: who holds them, and which is taken next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .prefix_cache import PrefixCache


class BlockPool:
    """Reference counts over `num_blocks` block ids, and the free ones in the order in which they are reused.

    A free block may still hold a cached prefix; it is forgotten only when it is taken for new tokens, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.cache = PrefixCache()
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds: acquiring them takes that many from `num_free`."""
        return sum(self._references[block] == 0 for block in blocks)

    def allocate(self) -> int:
        """Take the free block that is least worth keeping; the caller has checked `num_free`."""
        block, _ = self._free.popitem(last=False)
        assert self._references[block] == 0
        self._references[block] = 1
        self.cache.forget(block)
        return block

    def acquire(self, blocks: Iterable[int]) -> None:
        """Hold cached blocks once more."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks, given in sequence order.

        The end of a sequence is freed before its start, so that of a cached prefix the start survives longest; a block without
        a cached prefix is the next to be reused.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self.cache:
                    self._free.move_to_end(block, last=False)
