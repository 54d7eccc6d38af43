"""Paged batches to compare engines on, made of real text.

They are the steps of a small serving run: a prefill of sequences whose lengths lie around block edges, a
step that mixes decoding, a chunk of a prefill across an edge and a new sequence, and a step that only decodes. Blocks are handed
out in no order, and every slot that no token has written holds large random numbers, so that one that is read in error shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from qwenrt.plugins import ConfigError, reference
from qwenrt.runtime import EngineDir, EngineManifest
from qwenrt.runtime.text.tokenizer import Tokenizer

from .feeds import Array, Feed, check_feed, kv_dtype, kv_names, kv_shape
from .sample_text import TEXT

Prime = Callable[[Feed], Mapping[str, Array]]
"""Runs a step; what it gives as kv_cache_out.{i} is what the next step finds in the pools."""

_SPARE_BLOCKS = 3
_UNWRITTEN = 100.0


@dataclass(frozen=True)
class Batch:
    """A feed and what to call it."""

    name: str
    feed: Feed


def make_batches(engine: EngineDir, prime: Prime, *, text: str = TEXT, seed: int = 0) -> Iterator[Batch]:
    """Batches of the tokens of `text`, within the engine's limits; `prime` fills the KV pools from one to the next.

    Raises ConfigError if the text has no tokens.
    """
    manifest = engine.manifest
    rng = np.random.default_rng(seed)
    steps = _plan(manifest)
    lengths = np.sum([counts for _, counts in steps], axis=0)
    token_ids = Tokenizer.from_dir(engine.path).encode(text)
    if not token_ids:
        raise ConfigError("the text to compare on has no tokens; give some with --text")
    stream = iter(islice(cycle(token_ids), int(lengths.sum())))
    texts = [list(islice(stream, int(length))) for length in lengths]
    blocks = -(-lengths // manifest.block_size)
    num_blocks = int(blocks.sum()) + _SPARE_BLOCKS
    order = rng.permutation(num_blocks).astype(np.int32)
    tables = np.split(order[: blocks.sum()], np.cumsum(blocks)[:-1])
    pools: Feed = {name: _unwritten(manifest, num_blocks, rng) for name in kv_names(manifest)}
    done = np.zeros_like(lengths)
    for number, (name, counts) in enumerate(steps):
        feed = {**_index_inputs(texts, tables, done, counts, manifest.block_size), **pools}
        check_feed(feed, manifest)
        yield Batch(name, feed)
        done = done + counts
        if number + 1 < len(steps):
            results = prime(feed)
            pools = {name: results[name.replace("kv_cache.", "kv_cache_out.")] for name in kv_names(manifest)}


def _plan(manifest: EngineManifest) -> list[tuple[str, Array]]:
    """Name of each step, and how many tokens of each sequence it computes; at most what the engine's limits allow."""
    limits, block = manifest.limits, manifest.block_size
    room = limits.max_model_len
    lengths = [min(length, room) for length in (1, block - 1, block, block + 1, 2 * block + 1) if length]
    lengths = lengths[: max(1, limits.max_num_seqs - 1)]
    while len(lengths) > 1 and sum(lengths) > limits.max_num_batched_tokens:
        lengths.pop()
    first = np.array([min(lengths[0], limits.max_num_batched_tokens), *lengths[1:], 0])
    # One sequence goes on by a chunk across a block's edge, the others by one token, and a new one comes.
    mixed = np.ones_like(first)
    mixed[-2] = block + 2
    mixed[-1] = 5
    decode = np.ones_like(first)
    steps = [("prefill", first)]
    done = first
    for name, counts in (("mixed", mixed), ("decode", decode)):
        counts = np.minimum(counts, room - done)
        if len(first) > limits.max_num_seqs or counts.sum() > limits.max_num_batched_tokens:
            counts[-1] = 0
        while counts.sum() > limits.max_num_batched_tokens:
            counts[counts.argmax()] -= 1
        if counts.any():
            steps.append((name, counts))
            done = done + counts
    return steps


def _index_inputs(
    texts: Sequence[list[int]], tables: Sequence[Array], done: Array, counts: Array, block_size: int
) -> Feed:
    """The index inputs of a step of `counts` tokens of each sequence after `done` ones; every row's logits are wanted."""
    rows = [index for index, count in enumerate(counts) if count]
    lengths = done + counts
    width = max(-(-int(lengths[index]) // block_size) for index in rows)
    block_tables = np.full((len(rows), width), -1, np.int32)
    for row, index in enumerate(rows):
        needed = -(-int(lengths[index]) // block_size)
        block_tables[row, :needed] = tables[index][:needed]
    spans = [range(int(done[index]), int(lengths[index])) for index in rows]
    total = int(counts.sum())
    return {
        "input_ids": np.array([texts[i][p] for i, span in zip(rows, spans, strict=True) for p in span], np.int32),
        "positions": np.array([position for span in spans for position in span], np.int32),
        "block_tables": block_tables,
        "seq_lens": lengths[rows].astype(np.int32),
        "query_start": np.cumsum([0, *counts[rows]]).astype(np.int32),
        "logits_indices": np.arange(total, dtype=np.int32),
    }


def one_sequence(
    token_ids: Sequence[int], manifest: EngineManifest, start: int, stop: int, pools: Feed | None = None
) -> Feed:
    """A step that computes tokens `start` to `stop` of one sequence, and the logits of them all.

    pools: what a step before gave as kv_cache_out.{i}; from the first token on none are needed.
    """
    num_blocks = -(-len(token_ids) // manifest.block_size)
    table = np.arange(num_blocks, dtype=np.int32)
    done, counts = np.array([start]), np.array([stop - start])
    feed = _index_inputs([list(token_ids)], [table], done, counts, manifest.block_size)
    if pools is None:
        return feed | {
            name: np.zeros(kv_shape(manifest, num_blocks), kv_dtype(manifest)) for name in kv_names(manifest)
        }
    return feed | {name: pools[name.replace("kv_cache.", "kv_cache_out.")] for name in kv_names(manifest)}


def _unwritten(manifest: EngineManifest, num_blocks: int, rng: np.random.Generator) -> Array:
    shape = (*kv_shape(manifest, num_blocks)[:-1], manifest.model.head_dim)
    return reference.kv_rows(rng.uniform(-_UNWRITTEN, _UNWRITTEN, shape).astype(np.float32), kv_dtype(manifest))
