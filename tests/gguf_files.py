"""GGUF files in the layout that llama.cpp's converters give them, written by the package `gguf`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Array = npt.NDArray[Any]
Types = gguf.GGMLQuantizationType
_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
MIXES: dict[str, Callable[[str], Types]] = {
    "F16": lambda name: Types.F16,
    "floats": lambda name: Types.F32 if "token_embd" in name else Types.BF16 if "ffn" in name else Types.F16,
    "Q8_0": lambda name: Types.Q8_0,
    "Q4_0": lambda name: Types.Q4_0,
    "Q4_K_M": lambda name: Types.Q6_K if name.split(".")[-2] in ("token_embd", "attn_v", "ffn_down") else Types.Q4_K,
}
"""Per name of a mix the type of a matrix, by its name in the file. Vectors and routers are float32."""


def write_gguf(path: Path, checkpoint: Path, reference: Path, mix: str, **metadata: Any) -> Path:
    """Write a checkpoint folder as a GGUF file; `reference` becomes the folder with what its tensors then stand for, float32.

    metadata: key-value pairs over those that are made of the folder. Returns `path`.
    """
    shutil.copytree(checkpoint, reference)
    config = json.loads((checkpoint / "config.json").read_text())
    arch = config["model_type"].replace("_", "")
    weights, decoded = load_file(checkpoint / "model.safetensors"), dict[str, torch.Tensor]()
    tensors: dict[str, tuple[Array, Types]] = {}
    for number, (name, value) in enumerate(weights.items()):
        ours = file_name(name)
        kind = MIXES[mix](ours) if value.dim() == 2 and "ffn_gate_inp" not in ours else Types.F32
        data = blocks(value.float().numpy(), kind, seed=number)
        decoded[name] = torch.from_numpy(gguf.quants.dequantize(data, kind).reshape(value.shape).copy())
        tensors[ours] = (data, kind)
    save_file(decoded, reference / "model.safetensors", metadata={"format": "pt"})
    writer = gguf.GGUFWriter(path, arch)
    writer.add_quantization_version(2)
    pairs = {f"{arch}.{key}": value for key, value in _sizes(config).items()} | tokenizer_pairs(checkpoint) | metadata
    for key, value in pairs.items():
        kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kind.get(type(value), writer.add_array)(key, value)
    for name, (data, kind) in _stacked(tensors).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    sizes = {
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "context_length": config["max_position_embeddings"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
    }
    if config["model_type"] == "qwen3_moe":
        sizes["expert_count"] = config.get("num_local_experts", config.get("num_experts"))
        sizes["expert_used_count"] = config["num_experts_per_tok"]
        sizes["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return sizes


def tokenizer_pairs(folder: Path) -> dict[str, Any]:
    """What a folder's tokenizer is in the metadata; tokens that fill the vocabulary up are `unused`."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = {number: (token, gguf.TokenType.NORMAL) for token, number in tokenizer["model"]["vocab"].items()}
    for entry in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if entry["special"] else gguf.TokenType.USER_DEFINED
        tokens[entry["id"]] = (entry["content"], kind)
    end = max(tokens) + 8
    every = [tokens.get(number, (f"[PAD{number}]", gguf.TokenType.UNUSED)) for number in range(end)]
    ids = {token: number for number, (token, _) in tokens.items()}
    pairs: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [token for token, _ in every],
        "tokenizer.ggml.token_type": [int(kind) for _, kind in every],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": ids[config["eos_token"]],
        "tokenizer.ggml.padding_token_id": ids[config["pad_token"]],
        "tokenizer.ggml.add_bos_token": False,
    }
    if not pairs["tokenizer.ggml.merges"]:
        del pairs["tokenizer.ggml.merges"]
    template = folder / "chat_template.jinja"
    pairs["tokenizer.chat_template"] = template.read_text() if template.exists() else config["chat_template"]
    return pairs


def file_name(name: str) -> str:
    """The name in the file of a checkpoint's tensor; experts keep their number."""
    module, _, kind = name.rpartition(".")
    if module in _MODULES:
        return f"{_MODULES[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    if rest.startswith("mlp.experts."):
        _, _, expert, part = rest.split(".")
        return f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.{kind}.{expert}"
    return f"blk.{layer}.{_MODULES[rest]}.{kind}"


def _stacked(tensors: dict[str, tuple[Array, Types]]) -> dict[str, tuple[Array, Types]]:
    """With the experts of a layer as one tensor."""
    stacks: dict[str, list[tuple[Array, Types]]] = {}
    for name, value in tensors.items():
        stacks.setdefault(name.rpartition(".")[0] if name[-1].isdigit() else name, []).append(value)
    return {
        name: (np.stack([data for data, _ in values]) if "_exps." in name else values[0][0], values[0][1])
        for name, values in stacks.items()
    }


def blocks(values: Array, kind: Types, seed: int) -> Array:
    """Values in a type; for those that `gguf` cannot quantise to, random blocks of about the same size."""
    if kind in (Types.Q4_K, Types.Q6_K):
        rows, columns = values.shape
        rng = np.random.default_rng(seed)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 256, (rows, columns // block, size)).astype(np.uint8)
        scale = rng.uniform(0.5, 1.5, (rows, columns // block, 1)).astype(np.float32) / columns**0.5
        if kind == Types.Q4_K:
            halves = np.concatenate([scale / 250, scale / 30], axis=2).astype(np.float16)
            data[:, :, :4] = halves.view(np.uint8)
        else:
            data[:, :, -2:] = (scale / 1200).astype(np.float16).view(np.uint8)
        return data.reshape(rows, -1)
    return gguf.quants.quantize(values, kind)
