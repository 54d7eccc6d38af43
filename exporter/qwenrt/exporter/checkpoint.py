"""A checkpoint folder's weights: which tensor lies in which file, and whether they are what the config promises."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError
from qwenrt.runtime.lora import LoraAdapter, LowRank

from .config import ModelConfig
from .dequantize import ACTIVATION_PARTS, find_layout
from .folder import checked_folder, plain_file
from .json_fields import read_json_object, shown
from .quantization_config import Quantization
from .quantized_weight import Part, QuantizedWeight
from .safetensors_file import DTYPES, SafetensorsFile, TensorInfo, widened

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PREFIX = "model."
_ROOTS = ("embed_tokens.", "layers.", "norm.")
"""What the names of a decoder's tensors start with, after the prefix `model.` or in its place."""


class TensorFile(Protocol):
    """One file of a checkpoint."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> npt.NDArray[Any]:
        """A tensor as it is stored, a view of the mapped file."""

    def forget(self, name: str) -> None:
        """Drop its pages from this process's memory."""


class Checkpoint:
    """The tensors of a checkpoint, memory-mapped. Names have the prefix `model.`, whether or not the files write it.

    `tensors` has them as they are stored. A matrix that is quantised is stored in several; once `check` has found it so, `read`
    gives the decoded matrix under the name that it would have.
    """

    def __init__(self, folder: Path, files: Mapping[str, TensorFile], weight_map: dict[str, str]) -> None:
        self.folder = folder
        self._files = files
        self._sources = {
            canonical: (weight_map[name], name) for canonical, name in _canonical_names(folder, weight_map).items()
        }
        self.tensors: dict[str, TensorInfo] = {
            name: files[file].tensors[stored] for name, (file, stored) in self._sources.items()
        }

        self.quantized: dict[str, QuantizedWeight] = {}
        self._added: Mapping[str, LowRank] = {}

    def read(self, name: str) -> npt.NDArray[Any]:
        """A tensor as a view of the mapped file, bfloat16 as its bits in uint16; a quantised or merged matrix in float32.

        Raises ConfigError if a quantised matrix holds what is no finite number.
        """
        values = self.quantized[name].decode() if name in self.quantized else self._stored(name)
        added = self._added.get(name)
        return values if added is None else widened(values) + added.b @ added.a

    def row_scales(self, name: str) -> npt.NDArray[np.float32] | None:
        """Of a quantised matrix whose rows are integers times one number each, those; else None."""
        quantized = None if name in self._added else self.quantized.get(name)
        return None if quantized is None else quantized.row_scales()

    def merge(self, adapter: LoraAdapter, config: ModelConfig) -> None:
        """Let `read` give matrices with what the adapter adds to them; raises ConfigError if it does not fit the model."""
        adapter.check(projection_shapes(config))
        self._added = adapter.pairs

    def matrix_type(self, config: ModelConfig) -> str:
        """The type that holds every matrix as `read` gives it: float16 or bfloat16 if all are stored so, else float32."""
        if self.quantized or self._added:
            return "float32"
        types = {self.tensors[name].dtype for name, shape in expected_shapes(config).items() if len(shape) == 2}
        return DTYPES[types.pop()] if len(types) == 1 else "float32"

    def _stored(self, name: str) -> npt.NDArray[Any]:
        file, stored = self._sources[name]
        return self._files[file].read(stored)

    def forget(self, name: str) -> None:
        """Drop a tensor's pages from this process's memory; a later read maps them again."""
        quantized = self.quantized.get(name)
        for part in [f"{quantized.module}.{part}" for part in quantized.parts] if quantized else [name]:
            file, stored = self._sources[part]
            self._files[file].forget(stored)

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError unless the tensors are those of `config`: none missing, none unknown, shapes and types right."""
        expected = expected_shapes(config)
        used = set(expected)
        if config.quantization:
            self.quantized = dict(self._quantized(expected, config.quantization))
            used |= {f"{weight.module}.{part}" for weight in self.quantized.values() for part in weight.parts}
        extra = [name for name in self.tensors if name not in used and not self._needless(name, config)]
        missing = [name for name in expected if name not in self.tensors and name not in self.quantized]
        if missing:
            raise ConfigError(
                f"checkpoint {self.folder} lacks {_some(missing)}, which its config.json asks for; download it again"
            )
        if extra:
            raise ConfigError(
                f"checkpoint {self.folder} has {_some(extra)}, which its config.json has no place for; "
                "give the checkpoint that belongs to the config"
            )
        for name, shape in expected.items():
            if name in self.quantized:
                continue
            info = self.tensors[name]
            if info.shape != shape:
                raise ConfigError(f"{info.file}: {name} has shape {list(info.shape)}, {_reason(name, shape, config)}")
            if info.dtype not in DTYPES:
                known = config.quantization or "no quantization_config"
                raise ConfigError(
                    f"{info.file}: {name} is {info.dtype}, must be {', '.join(DTYPES)}; config.json has {known}, "
                    "give the checkpoint that belongs to it"
                )

    def _quantized(
        self, expected: Mapping[str, tuple[int, ...]], quantization: Quantization
    ) -> Iterator[tuple[str, QuantizedWeight]]:
        """The matrices that are stored in parts."""
        modules: dict[str, dict[str, Part]] = {}
        for name, info in self.tensors.items():
            module, _, part = name.rpartition(".")
            modules.setdefault(module, {})[part] = Part(info, functools.partial(self._stored, name))
        for name, shape in expected.items():
            module, _, kind = name.rpartition(".")
            parts = modules.get(module, {})
            layout = find_layout(parts, quantization) if kind == "weight" and len(shape) == 2 else None
            if layout:
                known = {part: parts[part] for part in (*layout.required, *layout.optional) if part in parts}
                yield name, layout(module, known, (shape[0], shape[1]), quantization)

    def _needless(self, name: str, config: ModelConfig) -> bool:
        """Whether a tensor that has no place does no harm.

        A tied head is the embedding, whatever the file holds in its place, and embeddings need no head; inv_freq is what older
        transformers saved of RoPE; activations are not quantised here, so their scales are left; GPTQ's tools write biases of
        zeros.
        """
        module, _, part = name.rpartition(".")
        if part == "inv_freq" or (not config.has_lm_head and name.startswith("lm_head.")):
            return True
        if config.task == "embed" and name.startswith("score."):
            return True
        if config.quantization is None:
            return False
        return part in ACTIVATION_PARTS or (
            part == "bias"
            and f"{module}.weight" in self.quantized
            and self.tensors[name].dtype in DTYPES
            and not self._stored(name).any()
        )


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Map a folder's `model.safetensors`, or the shards that `model.safetensors.index.json` names; the index wins.

    Raises ConfigError naming the file that is missing, truncated, damaged, or not where the index says.
    """
    path = checked_folder(folder)
    if os.path.lexists(path / _INDEX):
        weight_map = _read_index(path)
        files = {name: SafetensorsFile(plain_file(path, name)) for name in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            if name not in files[file].tensors:
                raise ConfigError(
                    f"{path / file} lacks {shown(name)}, which {_INDEX} places there; download the checkpoint again"
                )
        return Checkpoint(path, files, weight_map)
    if not os.path.lexists(path / _SINGLE):
        other = next(iter(sorted(path.glob("*.bin")) + sorted(path.glob("*.pt*"))), None)
        found = f"; {other.name} is not read, save it as safetensors" if other else ""
        if gguf := next(iter(sorted(path.glob("*.gguf"))), None):
            found = f"; give the file {gguf} itself"
        raise ConfigError(f"checkpoint {path} has neither {_SINGLE} nor {_INDEX}{found}")
    single = SafetensorsFile(plain_file(path, _SINGLE))
    return Checkpoint(path, {_SINGLE: single}, dict.fromkeys(single.tensors, _SINGLE))


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of `config` must hold, as transformers names them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    attention = {
        "self_attn.q_proj": (config.q_size, hidden, config.attention_bias),
        "self_attn.k_proj": (config.kv_size, hidden, config.attention_bias),
        "self_attn.v_proj": (config.kv_size, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, config.q_size, config.output_bias),
    }
    plain_mlp = _swiglu("mlp.", hidden, inner, config.mlp_bias)
    experts, mixture = config.experts, dict[str, tuple[int, int, bool]]()
    if experts:
        mixture["mlp.gate"] = (experts.num_experts, hidden, False)
        for expert in range(experts.num_experts):
            mixture |= _swiglu(f"mlp.experts.{expert}.", hidden, experts.intermediate_size, False)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        mlp = mixture if experts and experts.layers[layer] else plain_mlp
        for name, (rows, columns, bias) in (attention | mlp).items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"{prefix}{name}.weight"] = (size,)
    shapes["model.norm.weight"] = (hidden,)
    if config.has_lm_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.task == "classify":
        shapes["score.weight"] = (len(config.labels), hidden)
    return shapes


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of the matrices that an adapter may change: all but the embedding, and a head that is the embedding."""
    return {
        name: shape
        for name, shape in expected_shapes(config).items()
        if len(shape) == 2 and name != "model.embed_tokens.weight"
    }


def _swiglu(prefix: str, hidden: int, inner: int, bias: bool) -> dict[str, tuple[int, int, bool]]:
    """Rows, columns and whether there is a bias, for the projections of an MLP."""
    return {
        prefix + "gate_proj": (inner, hidden, bias),
        prefix + "up_proj": (inner, hidden, bias),
        prefix + "down_proj": (hidden, inner, bias),
    }


def _canonical_names(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Names with the prefix `model.` to names as stored; all of the decoder's names must have it, or none."""
    flat = [name for name in names if name.startswith(_ROOTS)]
    prefixed = [name for name in names if name.startswith(_PREFIX)]
    if flat and prefixed:
        raise ConfigError(
            f"checkpoint {folder} names some tensors with the prefix {_PREFIX!r} ({prefixed[0]}) and some without "
            f"({flat[0]}); save it again with one spelling"
        )
    if flat:
        return {_PREFIX + name if name.startswith(_ROOTS) else name: name for name in names}
    return {name: name for name in names}


def _read_index(folder: Path) -> dict[str, str]:
    path = plain_file(folder, _INDEX)
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path}: weight_map must be an object that maps tensors to files; download it again")
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or any(c in file for c in "/\\")
            or not file.isprintable()
        ):
            raise ConfigError(
                f"{path}: {shown(name)} lies in {shown(file)}, which is no file name in this folder; download it again"
            )
    return weight_map


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return shown(names[0]) + rest


def _reason(name: str, shape: tuple[int, ...], config: ModelConfig) -> str:
    text = f"config.json makes it {list(shape)}"
    if "self_attn" in name:
        origin = "the default, for config.json has none" if config.head_dim_is_default else "from config.json"
        text += (
            f" (head_dim {config.head_dim}, {origin}; num_attention_heads {config.num_heads}, "
            f"num_key_value_heads {config.num_kv_heads}, hidden_size {config.hidden_size}); correct config.json"
        )
    return text
