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
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
)

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


MODELS: dict[str, Any] = {
    "generate": AutoModelForCausalLM,
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
}


def write_checkpoint(
    path: Path, seed: int = 0, shards: int = 1, family: str = "qwen3", task: str = "generate", **config: Any
) -> Path:
    """Write a complete checkpoint folder: config, weights in `shards` files, byte-level tokenizer, chat template.

    `family` is the model_type, `task` says with which head, as `MODELS` has it. `config` overrides `TINY`; `dtype` among it
    ("float32" by default) is the type of the weights. Norm weights are uniform in [0.5, 1.5) so that one that is skipped or
    swapped shows; matrices are normal and scaled to keep activations near 1, biases are normal with standard deviation 0.5.
    Returns `path`.
    """
    values = {**TINY, **config}
    dtype = getattr(torch, values.pop("dtype", "float32"))
    ids = special_ids(values["vocab_size"])
    tokens = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    hf_config = AutoConfig.for_model(family, **{**tokens, **values})
    weights = {name: value.to(dtype) for name, value in random_weights(hf_config, seed, task).items()}
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


def random_weights(config: PreTrainedConfig, seed: int, task: str = "generate") -> dict[str, torch.Tensor]:
    """What a checkpoint of `config` holds, float32, by the names that published ones have.

    Without `lm_head.weight` where it is tied; experts one by one, where transformers' modules have them stacked.
    """
    with torch.device("meta"):
        model = MODELS[task].from_config(config)
    config.architectures = [type(model).__name__]
    shapes: dict[str, Sequence[int]] = {}
    for name, value in model.state_dict().items():
        shapes |= _of_experts(name, value.shape) if ".experts." in name else {name: value.shape}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
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


def append_end_of_text(path: Path) -> None:
    """Let a checkpoint's tokenizer end every text with <|endoftext|>, as Qwen3-Embedding's does."""
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    name = "<|endoftext|>"
    (token_id,) = (token["id"] for token in tokenizer["added_tokens"] if token["content"] == name)
    ends = [{"SpecialToken": {"id": name, "type_id": 0}}]
    first, second = ({"Sequence": {"id": which, "type_id": 0}} for which in "AB")
    template = {
        "type": "TemplateProcessing",
        "single": [first, *ends],
        "pair": [first, *ends, second, *ends],
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]}},
    }
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [tokenizer["post_processor"], template]}
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def write_modules(path: Path, *, pooling: dict[str, Any] | None = None, last: str = "Normalize") -> None:
    """The files by which sentence-transformers knows an embedding model."""
    kinds = ("Transformer", "Pooling", last)
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules, indent=2))
    (path / "1_Pooling").mkdir()
    fields = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(fields if pooling is None else pooling))


def name_tokens(path: Path, names: dict[int, str]) -> None:
    """Give ids of a checkpoint's vocabulary that no text uses other names."""
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    kept = {token: i for token, i in tokenizer["model"]["vocab"].items() if i not in names}
    tokenizer["model"]["vocab"] = kept | {name: i for i, name in names.items()}
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
