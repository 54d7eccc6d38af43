"""One step's named inputs, as every runner takes them: a paged batch and the KV pools before it.

A feed is a mapping from the names of the graph's inputs to arrays, the form that polygraphy feeds to its runners.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError, reference
from qwenrt.runtime import EngineManifest

Array = npt.NDArray[Any]
Feed = dict[str, Array]

INDEX_INPUTS = ("input_ids", "positions", "block_tables", "seq_lens", "query_start", "logits_indices")
_DTYPES: dict[str, npt.DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8": ml_dtypes.float8_e4m3fn,
    "int8": np.int8,
}


def kv_names(manifest: EngineManifest) -> list[str]:
    """The names of the KV pools, layer by layer."""
    return [f"kv_cache.{layer}" for layer in range(manifest.model.num_layers)]


def kv_dtype(manifest: EngineManifest) -> np.dtype[Any]:
    """The NumPy type of the KV pools."""
    return np.dtype(_DTYPES[manifest.kv_dtype])


def kv_shape(manifest: EngineManifest, num_blocks: int) -> tuple[int, ...]:
    """[num_blocks, 2, num_kv_heads, block_size, kv_row]."""
    return (num_blocks, 2, manifest.model.num_kv_heads, manifest.block_size, manifest.kv_row)


def check_feed(feed: Mapping[str, Array], manifest: EngineManifest) -> None:
    """Raise ConfigError, naming the input and what is wrong with it, unless `feed` is a step that a runtime could make.

    Random numbers in the place of block tables, positions or lengths would make every comparison meaningless.
    """
    expected = {*INDEX_INPUTS, *kv_names(manifest)}
    for name in sorted(expected ^ feed.keys()):
        state = "is missing" if name in expected else "is no input of this engine"
        raise _wrong(f"{name} {state}")
    for name in INDEX_INPUTS:
        if feed[name].dtype != np.int32 or feed[name].ndim != (2 if name == "block_tables" else 1):
            raise _wrong(f"{name} is {feed[name].dtype} of rank {feed[name].ndim}, must be int32, one row a sequence")
    num_blocks = len(feed["kv_cache.0"]) if feed["kv_cache.0"].ndim else 0
    for name in kv_names(manifest):
        if feed[name].dtype != kv_dtype(manifest) or feed[name].shape != kv_shape(manifest, num_blocks):
            raise _wrong(
                f"{name} is {feed[name].dtype} {list(feed[name].shape)}, must be {kv_dtype(manifest)} "
                f"{list(kv_shape(manifest, num_blocks))}"
            )
    num_tokens = len(feed["input_ids"])
    if not num_tokens:
        raise _wrong("input_ids is empty")
    _check_range("input_ids", feed["input_ids"], manifest.model.vocab_size)
    _check_range("logits_indices", feed["logits_indices"], num_tokens)
    _check_attention(feed, manifest)
    _check_owners(feed, manifest)


def _wrong(reason: str) -> ConfigError:
    return ConfigError(
        f"not a valid paged batch: {reason}; give batches recorded with qwenrt generate --record, saved with "
        "qwenrt compare --save-inputs, or made by the data loader qwenrt.tools.compare.load_data"
    )


def _check_range(name: str, values: Array, size: int) -> None:
    bad = np.flatnonzero((values < 0) | (values >= size))
    if bad.size:
        raise _wrong(f"{name}[{bad[0]}] is {values[bad[0]]}, must be 0 to {size - 1}")


def _check_attention(feed: Mapping[str, Array], manifest: EngineManifest) -> None:
    """The contract of PagedAttention itself, checked by its reference; what it only looks at the shape of takes no memory."""
    model = manifest.model
    num_tokens, heads = len(feed["input_ids"]), model.num_heads + 2 * model.num_kv_heads
    empty = np.broadcast_to(np.float32(0), (0,))
    try:
        reference.check_paged_attention(
            np.broadcast_to(np.float32(0), (num_tokens, heads * model.head_dim)),
            empty,
            empty,
            np.broadcast_to(np.float32(0), (manifest.limits.max_model_len, model.head_dim)),
            *(feed[name] for name in ("positions", "kv_cache.0", "block_tables", "seq_lens", "query_start")),
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=manifest.block_size,
        )
    except ConfigError as error:
        raise _wrong(str(error)) from None


def _check_owners(feed: Mapping[str, Array], manifest: EngineManifest) -> None:
    """Blocks may be shared by what reads them, but a slot that is written belongs to one token."""
    places = Places(feed, manifest.block_size)
    slots = places.blocks.astype(np.int64) * manifest.block_size + places.slots
    new = slots[places.new]
    unique, counts = np.unique(new, return_counts=True)
    if (counts > 1).any():
        slot = int(unique[counts > 1][0])
        raise _wrong(
            f"two tokens are written to block {slot // manifest.block_size}, slot {slot % manifest.block_size}"
        )
    clobbered = np.isin(slots[~places.new], new)
    if clobbered.any():
        slot = int(slots[~places.new][clobbered][0])
        block = slot // manifest.block_size
        raise _wrong(f"block {block}, slot {slot % manifest.block_size} is written by one sequence and read by another")


@dataclass(frozen=True)
class Places:
    """Where every token of every sequence's context lies, in the order of sequences and positions."""

    feed: Mapping[str, Array]
    block_size: int

    @cached_property
    def sequences(self) -> Array:
        """[N] sequence of each token; those without rows in this step have none here."""
        return np.repeat(np.arange(len(self._lengths)), self._lengths)

    @cached_property
    def positions(self) -> Array:
        """[N] position in its sequence."""
        starts = np.cumsum(self._lengths) - self._lengths
        positions: Array = np.arange(self._lengths.sum()) - np.repeat(starts, self._lengths)
        return positions

    @cached_property
    def new(self) -> npt.NDArray[np.bool_]:
        """[N] whether this step writes it."""
        counts = np.diff(self.feed["query_start"])
        new: npt.NDArray[np.bool_] = self.positions >= (self._lengths - counts)[self.sequences]
        return new

    @cached_property
    def blocks(self) -> Array:
        """[N] block of the pool."""
        blocks: Array = self.feed["block_tables"][self.sequences, self.positions // self.block_size]
        return blocks

    @cached_property
    def slots(self) -> Array:
        """[N] slot in the block."""
        return self.positions % self.block_size

    @cached_property
    def _lengths(self) -> Array:
        counts = np.diff(self.feed["query_start"])
        return np.where(counts > 0, self.feed["seq_lens"], 0).astype(np.int64)


def row_place(feed: Mapping[str, Array], row: int) -> str:
    """What a row of the step is, for people: "row 7 (sequence 1, position 3)"."""
    sequence = int(np.searchsorted(feed["query_start"], row, side="right")) - 1
    if row >= feed["query_start"][-1]:
        return f"row {row} (padding)"
    return f"row {row} (sequence {sequence}, position {feed['positions'][row]})"
