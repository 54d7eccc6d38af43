"""How large activations get, which a static float8 scale must cover: the model computes some text, in float32, layer by layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import tokenizers
import torch
from torch import Tensor, nn

from .checkpoint import Checkpoint
from .config import ModelConfig
from .lower.tensorrt_weights import Ranges
from .modeling import Batch, Qwen3DecoderLayer, parameter_sources
from .safetensors_file import widened

_MAX_TOKENS = 128
"""Of a paragraph."""


def calibration_tokens(tokenizer: Path) -> list[list[int]]:
    """The token ids of each paragraph of calibration.txt: prose, code, figures, chat, several languages."""
    text = (resources.files(__package__) / "calibration.txt").read_text(encoding="utf-8")
    encode = tokenizers.Tokenizer.from_file(str(tokenizer)).encode
    return [encode(paragraph.strip()).ids[:_MAX_TOKENS] for paragraph in text.split("\n\n")]


@torch.inference_mode()
def measure_ranges(
    config: ModelConfig,
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int, int], None],
) -> Ranges:
    """Largest magnitudes of each projection's inputs, over the sequences, and of its weights.

    One layer's weights are in memory at a time. `progress` takes layers done and all.
    """
    ids = np.fromiter((token for sequence in sequences for token in sequence), np.int64)
    x = torch.from_numpy(widened(checkpoint.read("model.embed_tokens.weight")[ids]))
    checkpoint.forget("model.embed_tokens.weight")
    block_size = max(map(len, sequences))
    batch = _batch(sequences)
    rope = torch.from_numpy(config.rope.table(block_size, config.head_dim))
    sources = parameter_sources(config)
    inputs: dict[str, float] = {}
    weights: dict[str, float] = {}
    for layer in range(config.num_layers):
        progress(layer, config.num_layers)
        prefix = f"model.layers.{layer}."
        module = Qwen3DecoderLayer(config, layer, block_size)
        for name, parameter in module.named_parameters():
            if sources[prefix + name]:  # a family without norms of q and k has none for them
                parameter.copy_(_read(checkpoint, sources[prefix + name]))
        for name, child in module.named_modules():
            if isinstance(child, nn.Linear):
                weights[prefix + name] = float(child.weight.abs().max())
                child.register_forward_pre_hook(_recorder(inputs, prefix + name))
        cache = torch.zeros(len(sequences), 2, config.num_kv_heads, block_size, config.head_dim)
        x, _ = module(x, rope, batch, cache)
    progress(config.num_layers, config.num_layers)
    return Ranges(inputs, weights)


def _batch(sequences: Sequence[Sequence[int]]) -> Batch:
    """The sequences as one step, each in a cache block of its own."""
    lengths = [len(sequence) for sequence in sequences]
    count = len(lengths)
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    query_start = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    blocks = torch.arange(count, dtype=torch.int32).reshape(count, 1)
    return Batch(positions, blocks, torch.tensor(lengths, dtype=torch.int32), query_start)


def _read(checkpoint: Checkpoint, sources: Sequence[str]) -> Tensor:
    """Checkpoint tensors one below the other, float32."""
    whole = np.concatenate([widened(checkpoint.read(source)) for source in sources])
    for source in sources:
        checkpoint.forget(source)
    return torch.from_numpy(whole)


def _recorder(largest: dict[str, float], name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """A hook that keeps the largest magnitude of a module's input."""

    def record(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        largest[name] = float(arguments[0].abs().max())

    return record
