"""Our torch modules with a checkpoint's weights, and steps to run them on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from qwenrt.exporter import eager
from qwenrt.exporter.modeling import Qwen3ForCausalLM

Array = npt.NDArray[np.int32]

load_module = functools.partial(eager.load_module, max_model_len=256)


class Step(NamedTuple):
    """The index inputs of one step, under the names that the graph has for them."""

    input_ids: Array
    positions: Array
    block_tables: Array
    seq_lens: Array
    query_start: Array
    logits_indices: Array


def make_step(
    chunks: Sequence[tuple[Sequence[int], int]],
    block_tables: Array,
    rows: Sequence[int] | None = None,
) -> Step:
    """A step of chunks (token ids, position of the first), one a sequence; `rows` have logits, all of them by default."""
    lengths = [len(ids) for ids, _ in chunks]
    total = sum(lengths)
    return Step(
        input_ids=np.concatenate([ids for ids, _ in chunks]).astype(np.int32),
        positions=np.concatenate([np.arange(start, start + len(ids)) for ids, start in chunks]).astype(np.int32),
        block_tables=block_tables,
        seq_lens=np.array([start + len(ids) for ids, start in chunks], np.int32),
        query_start=np.cumsum([0, *lengths]).astype(np.int32),
        logits_indices=np.array(range(total) if rows is None else rows, np.int32),
    )


def scattered_blocks(num_seqs: int, max_blocks: int, num_blocks: int, seed: int = 0) -> Array:
    """Distinct blocks for every sequence, in no order."""
    blocks = np.random.default_rng(seed).permutation(num_blocks)[: num_seqs * max_blocks]
    return blocks.reshape(num_seqs, max_blocks).astype(np.int32)


def empty_caches(module: Qwen3ForCausalLM, num_blocks: int, block_size: int) -> list[torch.Tensor]:
    config = module.config
    shape = (num_blocks, 2, config.num_kv_heads, block_size, config.head_dim)
    # What no token has written must not matter.
    return [torch.full(shape, torch.nan) for _ in range(config.num_layers)]


@torch.inference_mode()
def run(module: Qwen3ForCausalLM, step: Step, caches: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [R, vocab] and the caches after the step."""
    logits, caches = module(*(torch.from_numpy(array) for array in step), caches)
    return logits, caches
