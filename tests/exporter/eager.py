"""Our torch modules with a checkpoint's weights, and steps to run them on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from qwenrt.exporter import Checkpoint, ModelConfig, open_checkpoint
from qwenrt.exporter.modeling import Qwen3ForCausalLM, parameter_sources

Array = npt.NDArray[np.int32]


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


def load_module(folder: Path, *, block_size: int, max_model_len: int = 256) -> Qwen3ForCausalLM:
    """Qwen3ForCausalLM in float32 with the weights of a checkpoint."""
    config, checkpoint = ModelConfig.from_dir(folder), open_checkpoint(folder)
    checkpoint.check(config)
    module = Qwen3ForCausalLM(config, block_size=block_size, max_model_len=max_model_len).eval()
    state = {
        name: torch.cat([torch.empty(0), *(_tensor(checkpoint, source) for source in sources)])
        for name, sources in parameter_sources(config).items()
    }
    state["rope"] = torch.from_numpy(config.rope.table(max_model_len, config.head_dim))
    module.load_state_dict(state, strict=True)
    return module


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


def _tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    array = np.array(checkpoint.read(name))
    tensor = torch.from_numpy(array)
    return (tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor).float()
