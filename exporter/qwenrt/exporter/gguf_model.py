"""A GGUF file as a checkpoint: its metadata as a config, its tensors under the names that transformers gives them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy.typing as npt

from qwenrt.plugins import ConfigError

from .checkpoint import Checkpoint
from .config import ModelConfig
from .gguf_file import GgufFile
from .gguf_tokenizer import end_of_text_ids, tokenizer_files
from .json_fields import Fields, shown
from .quantization_config import Quantization
from .safetensors_file import TensorInfo

_MODEL_TYPES = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""Of transformers, by general.architecture. Llama is none of them: its converters permute q and k."""
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
_EXPERT_SIZES = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_LAST_TOKEN = 3
"""Of pooling_type."""
_SCALING = ("type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")
_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors [experts, rows, columns], which a checkpoint has one by one."""


class GgufModel:
    """A GGUF file, as far as it is known without its tensors; raises ConfigError naming what is wrong or not supported."""

    def __init__(self, path: Path, task: str | None = None) -> None:
        self._file = GgufFile(path)
        self._fields = Fields(self._file.metadata, str(path))
        config = self._config()
        self.config = config.for_task(task or ("embed" if self._pools_last_token() else config.task))

    def checkpoint(self) -> Checkpoint:
        """Its tensors."""
        path = self._file.path
        weights = _Weights(self._file)
        return Checkpoint(path, {path.name: weights}, dict.fromkeys(weights.tensors, path.name))

    def texts(self) -> dict[str, bytes]:
        """What an engine folder holds beside the graph and the weights, by file name."""
        texts = tokenizer_files(self._file.metadata, self._fields.source)
        texts["generation_config.json"] = json.dumps({"eos_token_id": list(self.config.eos_token_ids)})
        return {name: text.encode() for name, text in texts.items()}

    def _config(self) -> ModelConfig:
        fields, metadata = self._fields, self._file.metadata
        arch = metadata.get("general.architecture")
        if not isinstance(arch, str) or arch not in _MODEL_TYPES:
            raise ConfigError(
                f"{fields.source}: general.architecture is {shown(arch)}, of GGUF files {', '.join(_MODEL_TYPES)} are supported"
            )
        for name in ("attention.sliding_window", "expert_shared_count", "leading_dense_block_count"):
            if metadata.get(f"{arch}.{name}"):
                raise ConfigError(
                    f"{fields.source}: {arch}.{name} is {shown(metadata[f'{arch}.{name}'])}, not supported"
                )
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise ConfigError(f"{fields.source} lacks the tensor token_embd.weight; download it again")
        values: dict[str, Any] = {
            "model_type": _MODEL_TYPES[arch],
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "rms_norm_eps": fields.number(f"{arch}.attention.layer_norm_rms_epsilon", low=1e-30, high=1.0),
            "eos_token_id": end_of_text_ids(metadata),
        }
        for name, key in (_SIZES | (_EXPERT_SIZES if arch == "qwen3moe" else {})).items():
            values[name] = fields.integer(f"{arch}.{key}")
        if arch == "qwen3moe":
            # What llama.cpp computes for this architecture, whatever the file says.
            values["norm_topk_prob"] = True
        head_dim = values["hidden_size"] // values["num_attention_heads"]
        values["head_dim"] = fields.integer(f"{arch}.attention.key_length", head_dim)
        if fields.integer(f"{arch}.attention.value_length", values["head_dim"]) != values["head_dim"]:
            raise fields.wrong(f"{arch}.attention.value_length", f"the key_length, {values['head_dim']}")
        values["rope_theta"] = fields.number(f"{arch}.rope.freq_base", 10000.0, low=1e-30, high=1e30)
        values["rope_scaling"] = self._rope_scaling(f"{arch}.rope.scaling.")
        config = ModelConfig.from_dict(values, source=fields.source)
        return dataclasses.replace(config, quantization=Quantization(method="gguf", bits=0))

    def _pools_last_token(self) -> bool:
        """Whether it is an embedding model, whose only way of pooling is to take the last token's row."""
        key = f"{self._file.metadata['general.architecture']}.pooling_type"
        kind = self._file.metadata.get(key, 0)
        if kind not in (0, _LAST_TOKEN):
            raise self._fields.wrong(key, f"0 (none) or {_LAST_TOKEN} (the last token)")
        return bool(kind == _LAST_TOKEN)

    def _rope_scaling(self, prefix: str) -> dict[str, Any] | None:
        found = {
            key.removeprefix(prefix): value for key, value in self._file.metadata.items() if key.startswith(prefix)
        }
        for name in found:
            if name not in _SCALING:
                raise ConfigError(
                    f"{self._fields.source}: {prefix}{name} is not supported, of it are {', '.join(_SCALING)}"
                )
        if found.get("type", "none") == "none":
            return None
        scaling = {"rope_type": found["type"], "factor": found.get("factor", 1.0)}
        names = {
            "original_context_length": "original_max_position_embeddings",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        }
        return scaling | {ours: found[theirs] for theirs, ours in names.items() if theirs in found}


class _Weights:
    """The file's tensors by transformers' names, experts one by one; unknown names stay as they are."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in file.tensors.items():
            self.tensors |= _renamed(name, info)

    def read(self, name: str) -> npt.NDArray[Any]:
        """As `GgufFile.read`."""
        return self._file.read(self.tensors[name])

    def forget(self, name: str) -> None:
        """As `GgufFile.forget`."""
        self._file.forget(self.tensors[name])


def _renamed(name: str, info: TensorInfo) -> dict[str, TensorInfo]:
    match = re.fullmatch(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return {name: info}
    layer, module, kind = match.groups()
    if layer is None:
        return {f"{_GLOBAL[module]}.{kind}" if module in _GLOBAL else name: info}
    prefix = f"model.layers.{layer}."
    if module in _EXPERTS and len(info.shape) == 3:
        size = (info.end - info.start) // info.shape[0]
        return {
            f"{prefix}mlp.experts.{expert}.{_EXPERTS[module]}.{kind}": dataclasses.replace(
                info, start=info.start + expert * size, end=info.start + (expert + 1) * size, shape=info.shape[1:]
            )
            for expert in range(info.shape[0])
        }
    return {f"{prefix}{_BLOCK[module]}.{kind}" if module in _BLOCK else name: info}
