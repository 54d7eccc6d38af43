"""Random calls of PagedAttention that keep its rules, with NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass
class Call:
    """The arguments of one call."""

    tensors: dict[str, Array]
    attributes: dict[str, Any] = field(default_factory=dict)


def make_call(
    sequences: Sequence[tuple[int, int]],
    *,
    dtype: Any,
    kv_dtype: Any = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    sliding_window: int = -1,
    norm: bool = True,
    padding_rows: int = 0,
    shared_blocks: int = 0,
    extra_columns: int = 1,
    seed: int = 0,
) -> Call:
    """A step of sequences, each (rows in the step, context length after it).

    Blocks are dealt in random order; the first `shared_blocks` of the first sequence also begin every longer context. What no
    sequence has written is NaN: free slots, spare blocks, the padding rows of qkv. Table entries that nobody needs name a NaN
    block or none at all; the length of a sequence without rows and the position of a padding row are garbage.
    """
    random = np.random.default_rng(seed)
    columns = [-(-length // block_size) for _, length in sequences]
    max_blocks = max([*columns, 1]) + extra_columns
    num_blocks = sum(columns) + 3
    free = list(random.permutation(num_blocks))
    spare = free.pop()
    tables = random.choice(np.array([spare, -1, num_blocks, -(2**31)], np.int32), (len(sequences), max_blocks))
    for s, count in enumerate(columns):
        tables[s, :count] = [free.pop() for _ in range(count)]
        computed = (sequences[s][1] - sequences[s][0]) // block_size
        shared = min(shared_blocks, computed, (sequences[0][1] - sequences[0][0]) // block_size)
        tables[s, :shared] = tables[0, :shared]

    rows = sum(count for count, _ in sequences)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = random.standard_normal((rows + padding_rows, width)).astype(np.float32)
    qkv[rows:] = np.nan
    pool = np.full((num_blocks, 2, num_kv_heads, block_size, head_dim), np.nan, np.float32)
    for s, (count, length) in enumerate(sequences):
        for position in range(length - count):
            slot = pool[tables[s, position // block_size], :, :, position % block_size]
            if np.isnan(slot).any():
                slot[...] = random.standard_normal(slot.shape)
    positions = [position for count, length in sequences for position in range(length - count, length)]
    max_positions = max([*(length for _, length in sequences), 1])
    angles = random.uniform(0, 2 * np.pi, (max_positions, head_dim // 2))
    norms = random.uniform(0.5, 1.5, (2, head_dim if norm else 0)).astype(dtype)
    return Call(
        tensors={
            "qkv": qkv.astype(dtype),
            "q_norm": norms[0],
            "k_norm": norms[1],
            "rope": np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32),
            "positions": np.array([*positions, *[-(2**31)] * padding_rows], np.int32),
            "kv_cache": pool.astype(kv_dtype or dtype),
            "block_tables": tables,
            "seq_lens": np.array([length if count else -7 for count, length in sequences], np.int32),
            "query_start": np.cumsum([0, *(count for count, _ in sequences)]).astype(np.int32),
        },
        attributes={
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "block_size": block_size,
            "scale": head_dim**-0.5,
            "norm_eps": 1e-6,
            "sliding_window": sliding_window,
        },
    )
