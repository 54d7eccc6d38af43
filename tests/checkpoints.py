"""Random-weight checkpoints of every family, made by transformers' own modules so that they owe nothing to ours."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from qwenrt.tools.byte_tokenizer import special_ids, tokenizer_files

from . import packing

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 320,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
"""A head_dim that is not hidden_size / num_attention_heads, and two query heads to each K/V head."""


def write_checkpoint(path: Path, seed: int = 0, shards: int = 1, family: str = "qwen3", **config: Any) -> Path:
    """Write a complete checkpoint folder: config, weights in `shards` files, byte-level tokenizer, chat template.

    `family` is the model_type. `config` overrides `TINY`; `dtype` among it ("float32" by default) is the type of the weights.
    Norm weights are uniform in [0.5, 1.5) so that one that is skipped or swapped shows; matrices are normal and scaled to keep
    activations near 1, biases are normal with standard deviation 0.5. Returns `path`.
    """
    values = {**TINY, **config}
    dtype = getattr(torch, values.pop("dtype", "float32"))
    ids = special_ids(values["vocab_size"])
    tokens = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    hf_config = AutoConfig.for_model(family, **{**tokens, **values})
    weights = {name: value.to(dtype) for name, value in random_weights(hf_config, seed).items()}
    hf_config.dtype = dtype
    path.mkdir(parents=True, exist_ok=True)
    hf_config.save_pretrained(path)
    eos = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    GenerationConfig(bos_token_id=ids["<|endoftext|>"], eos_token_id=eos).save_pretrained(path)
    for name, text in tokenizer_files(values["vocab_size"]).items():
        (path / name).write_text(text, encoding="utf-8")
    write_weights(path, weights, shards)
    return path


def quantize_checkpoint(
    path: Path, reference: Path, kind: str, plain: Callable[[str], bool] = lambda name: False
) -> None:
    """Make a checkpoint one of a kind that `packing` has: projections are replaced by random ones, except the `plain`.

    `reference` becomes the same checkpoint in float32, with what the packed projections stand for.
    """
    shutil.copytree(path, reference)
    weights = load_file(path / "model.safetensors")
    decoded = dict(weights)
    for number, name in enumerate(list(weights)):
        if name.endswith("_proj.weight") and not plain(name):
            rows, columns = weights.pop(name).shape
            tensors, value = packing.quantized(kind, rows, columns, seed=number)
            decoded[name] = torch.from_numpy(value)
            module = name.removesuffix(".weight")
            weights |= {f"{module}.{part}": _as_torch(array) for part, array in tensors.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    save_file(decoded, reference / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = packing.CONFIGS[kind]
    (path / "config.json").write_text(json.dumps(config, indent=2))


def _as_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor of the same bits, 8-bit floats and bfloat16 too."""
    short = {"float8_e4m3fn": (np.uint8, torch.float8_e4m3fn), "bfloat16": (np.int16, torch.bfloat16)}
    array = np.ascontiguousarray(array)
    if array.dtype.name in short:
        bits, dtype = short[array.dtype.name]
        return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)


def random_weights(config: PreTrainedConfig, seed: int) -> dict[str, torch.Tensor]:
    """What a checkpoint of `config` holds, float32, by the names that published ones have.

    Without `lm_head.weight` where it is tied; experts one by one, where transformers' modules have them stacked.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    shapes: dict[str, Sequence[int]] = {}
    for name, value in model.state_dict().items():
        shapes |= _of_experts(name, value.shape) if ".experts." in name else {name: value.shape}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            weights[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            scale = 1 / math.sqrt(shape[1]) if len(shape) == 2 else 0.5
            weights[name] = torch.randn(shape, generator=generator) * scale
    return weights


def _of_experts(name: str, shape: Sequence[int]) -> dict[str, Sequence[int]]:
    """Names and shapes of the matrices of each expert that a stack [experts, rows, columns] is made of."""
    prefix, kind = name.rsplit(".", 1)
    parts = kind.removesuffix("_proj").split("_")
    rows = shape[1] // len(parts)
    return {f"{prefix}.{expert}.{part}_proj.weight": (rows, shape[2]) for expert in range(shape[0]) for part in parts}


def write_weights(path: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write tensors as `model.safetensors`, or as `shards` files of about as many tensors each and their index."""
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: weights[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(value.nbytes for value in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
