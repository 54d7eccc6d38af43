"""A model that a scheduler cannot fool: each KV slot stores a digest of the whole text up to it.

Computing a token checks that the slots of every earlier position hold the digests of exactly this text, so a block that was
shared in error, lost, or written one slot off fails at once. The next token is a function of the text alone, which gives the
tokens that a request must get whatever else is running.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from qwenrt.runtime.request import StepPlan

VOCAB_SIZE = 5


def digest(token_ids: Sequence[int]) -> int:
    return zlib.crc32(bytes(token_ids))


def next_token(token_ids: Sequence[int]) -> int:
    return digest(token_ids) % VOCAB_SIZE


def alone(prompt: Sequence[int], count: int) -> list[int]:
    """Prompt and the `count` tokens that must follow it."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids


def count_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of `drafts`, from the first on, are what was drawn."""
    for index, draft in enumerate(drafts):
        if drawn[index] != draft:
            return index
    return len(drafts)


class PrefixModel:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [[-1] * block_size for _ in range(num_blocks)]

    def execute(self, plan: StepPlan) -> list[list[int]]:
        """The drafts that are right and the token after them, for each chunk that samples."""
        for chunk in plan.chunks:
            tokens = [*chunk.request.token_ids, *chunk.drafts]
            for position in range(chunk.start, chunk.start + chunk.count):
                block, offset = self._slot(chunk.request.block_ids, position)
                self.slots[block][offset] = digest(tokens[: position + 1])
        sampled = []
        for chunk in plan.chunks:
            tokens = [*chunk.request.token_ids, *chunk.drafts]
            for position in range(chunk.start + chunk.count):
                block, offset = self._slot(chunk.request.block_ids, position)
                assert self.slots[block][offset] == digest(tokens[: position + 1]), (
                    f"position {position} is another text's"
                )
            if chunk.samples:
                known = chunk.request.num_tokens
                new = [next_token(tokens[: known + drawn]) for drawn in range(1 + len(chunk.drafts))]
                sampled.append(new[: 1 + count_accepted(chunk.drafts, new)])
        return sampled

    def _slot(self, block_ids: Sequence[int], position: int) -> tuple[int, int]:
        return block_ids[position // self.block_size], position % self.block_size
