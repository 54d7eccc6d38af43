"""A checkpoint of two kilobytes as files' contents, for tests that damage one a thousand times."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from safetensors.numpy import save

from tests import packing

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 8,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_LAYER = {
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "self_attn.q_norm": (4,),
    "self_attn.k_norm": (4,),
    "mlp.gate_proj": (8, 8),
    "mlp.up_proj": (8, 8),
    "mlp.down_proj": (8, 8),
    "input_layernorm": (8,),
    "post_attention_layernorm": (8,),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (16, 8),
    **{f"model.layers.0.{name}.weight": shape for name, shape in _LAYER.items()},
    "model.norm.weight": (8,),
}


def small_files(kind: str | None = None) -> dict[str, bytes]:
    """Contents of every file, by name; `kind`: how projections are quantised, one of `packing.CONFIGS`."""
    random = np.random.default_rng(0)
    tensors: packing.Tensors = {}
    for name, shape in SHAPES.items():
        if kind and name.endswith("_proj.weight"):
            parts, _ = packing.quantized(kind, *shape, seed=len(tensors))
            tensors |= {f"{name.removesuffix('.weight')}.{part}": array for part, array in parts.items()}
        else:
            tensors[name] = random.standard_normal(shape).astype(np.float32)
    config = CONFIG | ({"quantization_config": packing.CONFIGS[kind]} if kind else {})
    index = {"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    return {
        "config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [2, 3]}).encode(),
        "model.safetensors": save(tensors, {"format": "pt"}),
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
