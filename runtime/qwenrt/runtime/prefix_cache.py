"""Which KV block holds which tokens: blocks of equal text and equal past are found again by a chained hash."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def extend_block_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes = b"") -> None:
    """Append to `hashes` those of the full blocks of `token_ids` that it lacks.

    root: what the tokens are computed with besides the model, an adapter's digest; other roots have other hashes.

    A block's hash covers its token ids and the hash of the block before it, hence the whole past. BLAKE2b with 128 bits: a
    prompt cannot be built to collide with somebody else's.
    """
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), len(token_ids) // block_size):
        block = array("i", token_ids[index * block_size : (index + 1) * block_size])
        parent = hashlib.blake2b(parent + block.tobytes(), digest_size=16).digest()
        hashes.append(parent)


class PrefixCache:
    """The two-way map between block hashes and block ids."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `hashes`."""
        blocks = []
        for value in hashes:
            block = self._block_of.get(value)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, value: bytes, block: int) -> None:
        """Let `block` be found under `value`; the first block published under a hash stays the one that is found."""
        if value not in self._block_of and block not in self._hash_of:
            self._block_of[value] = block
            self._hash_of[block] = value

    def forget(self, block: int) -> None:
        """Drop a block whose contents are about to be overwritten."""
        value = self._hash_of.pop(block, None)
        if value is not None:
            del self._block_of[value]
