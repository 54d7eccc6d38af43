"""Random calls of PagedAttention that keep its rules, with NaN wherever nothing may be read; the op suite is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from .memory import Array

FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass
class Call:
    """The arguments of one call."""

    tensors: dict[str, Array]
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """All of it, by the names of the reference's parameters."""
        return {**self.tensors, **self.attributes}


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


@dataclass(frozen=True)
class Case:
    """A call of the op suite, made when it is wanted."""

    name: str
    sequences: Sequence[tuple[int, int]]
    options: Mapping[str, Any]

    def call(self) -> Call:
        """The same call every time."""
        return make_call(self.sequences, **self.options)

    def __str__(self) -> str:
        return self.name


MIXED = ((70, 200), (1, 300), (0, 40), (129, 129), (2, 65), (1, 1))
"""Prefill of a part and of a whole prompt, decoding, several rows that the decode kernel takes, a sequence without rows."""
GROUPS = ((2, 2), (4, 2), (8, 2), (8, 1), (16, 1), (14, 2), (3, 1), (5, 1))


def suite() -> list[Case]:
    """The op suite: every implementation of the CUDA kernels must give what the reference gives for each of these."""
    random = np.random.default_rng(0)
    many = [(int(random.integers(0, 4)) if n > 3 else 1, int(n)) for n in random.integers(1, 60, 70)]
    cases: list[tuple[str, Sequence[tuple[int, int]], dict[str, Any]]] = []
    for head_dim in (64, 128):
        for block_size in (16, 32, 64, 128):
            options = {"head_dim": head_dim, "block_size": block_size, "padding_rows": 3, "shared_blocks": 1}
            cases.append((f"mixed, head_dim {head_dim}, blocks of {block_size}", MIXED, options))
    for heads, kv_heads in GROUPS:
        options = {"num_heads": heads, "num_kv_heads": kv_heads}
        cases.append((f"{heads} heads over {kv_heads}", ((40, 90), (1, 77), (3, 20), (17, 17)), options))
    for length in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257):
        cases.append((f"decode at {length}", ((1, length),), {}))
    for window in (1, 7, 16, 64, 65, 130, 1000):
        cases.append((f"window of {window}", MIXED, {"sliding_window": window}))
    for rows in (1, 2, 5, 6, 16, 17):
        for heads in (1, 3, 16):
            cases.append(
                (f"{rows} rows, group of {heads}", ((rows, 80), (1, 9)), {"num_heads": heads, "num_kv_heads": 1})
            )
    cases += [
        ("no norm", MIXED, {"norm": False}),
        ("only padding", ((0, 5), (0, 0)), {"padding_rows": 5}),
        ("many sequences", many, {}),
        ("a hit, a fresh prompt and a decode", ((2, 14), (14, 14), (1, 33)), {}),
        ("a long sequence among short ones", ((1, 500), (1, 3), (2, 130), (1, 64), (1, 700)), {"num_kv_heads": 1}),
        ("one long sequence", ((1, 5000),), {"head_dim": 128}),
    ]
    made = [
        Case(f"{name}, {dtype}", sequences, {**options, "dtype": dtype})
        for name, sequences, options in cases
        for dtype in (FLOAT16, BFLOAT16)
    ]
    for rows in (8, 9, 16, 17, 63, 64, 65, 127, 128, 129):
        for before in (0, 1, 63, 64):
            name = f"prefill of {rows} after {before}, {BFLOAT16}"
            made.append(Case(name, ((rows, before + rows),), {"dtype": BFLOAT16}))
    for head_dim in (64, 128):
        for block_size, window in ((16, -1), (128, 50)):
            for dtype in (FLOAT16, BFLOAT16):
                options = {"head_dim": head_dim, "block_size": block_size, "sliding_window": window, "norm": False}
                name = f"float8 pool, head_dim {head_dim}, blocks of {block_size}, window {window}, {dtype}"
                made.append(Case(name, MIXED, {**options, "dtype": dtype, "kv_dtype": FLOAT8}))
    return made
