"""LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors, both from strangers.

An adapter adds scale * B A to some matrices W of a decoder (Hu et al., 2021). The scale is lora_alpha / r, or with `use_rslora`
lora_alpha / sqrt(r) (Kalajdzievski, 2023).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from qwenrt.plugins import ConfigError

from .text.tokenizer import read_text

Floats = npt.NDArray[np.float32]

MAX_RANK = 1024
_MAX_ALPHA = 1e9
MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""The products of an engine's graph that take adapters, and the checkpoint's projections that each is made of."""
_CONFIG_NAME, _WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 32 << 20
_PREFIX = "base_model.model."
_ROOTS = ("layers.", "norm.", "embed_tokens.")
"""What a decoder's module names start with where the base was loaded without its head."""
_DTYPES = ("F32", "F16", "BF16")
_REFUSED = (
    *(
        "alora_invocation_tokens",
        "arrow_config",
        "bias",
        "fan_in_fan_out",
        "kasa_config",
        "layer_replication",
        "lora_bias",
    ),
    *("megatron_config", "modules_to_save", "monteclora_config", "target_parameters", "trainable_token_indices"),
    *("use_bdlora", "use_dora", "use_qalora", "velora_config"),
)
"""Fields that make an adapter more, or something else, than a product of two matrices beside some Linear layers."""
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to begin the training that leave the base as it is; the others train beside a changed base."""


@dataclasses.dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one matrix [out, in]: `b @ a`."""

    a: Floats
    """[r, in]"""
    b: Floats
    """[out, r], the adapter's scale among it."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.b.shape[0], self.a.shape[1]

    @property
    def rank(self) -> int:
        """r."""
        return len(self.a)


@dataclasses.dataclass(frozen=True)
class LoraAdapter:
    """An adapter in memory: `pairs` has, by the name of the weight (`model.layers.0.self_attn.q_proj.weight`), what is added."""

    path: Path
    pairs: Mapping[str, LowRank]
    digest: bytes
    """Of its files: equal for equal adapters."""

    @classmethod
    def from_dir(cls, folder: str | os.PathLike[str]) -> LoraAdapter:
        """Read a folder; raises ConfigError naming the file, the field or the tensor that is wrong or not supported."""
        path = Path(folder)
        if not path.is_dir():
            raise ConfigError(f"adapter folder {path} does not exist; give a folder with {_CONFIG_NAME}")
        config_path, weights_path = _plain_file(path, _CONFIG_NAME), _plain_file(path, _WEIGHTS_NAME)
        scaling = _Scaling.from_file(config_path)
        digest = hashlib.blake2b(config_path.read_bytes(), digest_size=16)
        tensors = _read_tensors(weights_path, digest)
        return cls(path, dict(_pairs(weights_path, tensors, scaling)), digest.digest())

    @property
    def rank(self) -> int:
        """The largest of its matrices' ranks."""
        return max(pair.rank for pair in self.pairs.values())

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless it fits the matrices `shapes`, which are those that it may change."""
        for name, pair in self.pairs.items():
            if name not in shapes:
                raise ConfigError(
                    f"adapter {self.path} changes {name}, which is no projection of this model; give an adapter that was "
                    "trained on it"
                )
            if shapes[name] != pair.shape:
                raise ConfigError(
                    f"adapter {self.path} is for a {name} of shape {list(pair.shape)}, the model's is {list(shapes[name])}; "
                    "give an adapter that was trained on this model"
                )


@dataclasses.dataclass(frozen=True)
class _Scaling:
    """Rank and scale of each module."""

    source: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    rslora: bool

    @classmethod
    def from_file(cls, path: Path) -> _Scaling:
        text = read_text(path, _MAX_CONFIG_BYTES)
        try:
            config = json.loads(text or "")
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON ({error}); save the adapter again") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{path} must hold a JSON object; save the adapter again")
        if config.get("peft_type") != "LORA":
            raise ConfigError(f"{path}: peft_type is {_shown(config.get('peft_type'))}, only LORA is supported")
        for name in _REFUSED:
            if config.get(name) not in (None, False, "none", [], {}):
                raise ConfigError(
                    f"{path}: {name} is {_shown(config[name])}, which is not supported; merge the adapter with PEFT and "
                    "export the result"
                )
        if config.get("init_lora_weights") not in _PLAIN_INITS:
            raise ConfigError(
                f"{path}: init_lora_weights is {_shown(config['init_lora_weights'])}, which changes the base model too; "
                "merge the adapter with PEFT and export the result"
            )
        patterns = {name: config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
        for name, pattern in patterns.items():
            if not isinstance(pattern, dict) or not all(re.fullmatch(r"\^?[\w.]+", key) for key in pattern):
                raise ConfigError(f"{path}: {name} must be an object whose keys are names of modules, not patterns")
        rslora = config.get("use_rslora", False)
        if type(rslora) is not bool:
            raise ConfigError(f"{path}: use_rslora is {_shown(rslora)}, must be true or false")
        rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
        for value in (rank, *patterns["rank_pattern"].values()):
            if not (type(value) is int and 1 <= value <= MAX_RANK):
                raise ConfigError(f"{path}: r is {_shown(value)}, must be an integer from 1 to {MAX_RANK}")
        for value in (alpha, *patterns["alpha_pattern"].values()):
            if not (type(value) in (int, float) and abs(value) <= _MAX_ALPHA):
                raise ConfigError(f"{path}: lora_alpha is {_shown(value)}, must be a number of at most {_MAX_ALPHA:g}")
        return cls(str(path), rank, alpha, patterns["rank_pattern"], patterns["alpha_pattern"], rslora)

    def of(self, module: str) -> tuple[int, float]:
        """Rank and scale of a module, by its name without PEFT's prefix."""
        rank: int = _of_pattern(self.rank_pattern, module, self.rank)
        alpha: float = _of_pattern(self.alpha_pattern, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rslora else rank)


def _of_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first key that is the end of the module's name, or with a ^ all of it."""
    for key, value in pattern.items():
        if module == key.removeprefix("^") or module.endswith(f".{key}"):
            return value
    return default


def _read_tensors(path: Path, digest: Any) -> dict[str, Floats]:
    """Every tensor in float32; `digest` takes their bytes."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ConfigError(f"{path} names a header of {length} bytes, at most {_MAX_HEADER_BYTES} are read")
        tensors: dict[str, Floats] = {}
        with safetensors.safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                found = file.get_slice(name)
                if found.get_dtype() not in _DTYPES or len(found.get_shape()) != 2:
                    raise ConfigError(
                        f"{path}: {_shown(name)} is {found.get_dtype()} of shape {list(found.get_shape())}, must be a matrix of "
                        f"{', '.join(_DTYPES)}"
                    )
                values = file.get_tensor(name)
                digest.update(name.encode() + values.tobytes())
                tensors[name] = values.astype(np.float32)
                if not np.isfinite(tensors[name]).all():
                    raise ConfigError(f"{path}: {_shown(name)} holds what is no finite number; save the adapter again")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({error}); save the adapter again") from None
    return tensors


def _pairs(path: Path, tensors: Mapping[str, Floats], scaling: _Scaling) -> Any:
    """Weights' names with what is added to them."""
    halves: dict[str, dict[str, Floats]] = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(?:base_model\.model\.)?([\w.]+)\.lora_([AB])\.weight", name)
        if match is None:
            raise ConfigError(
                f"{path}: {_shown(name)} is no lora_A.weight or lora_B.weight of a Linear layer, which is all that is supported"
            )
        halves.setdefault(match[1], {})[match[2]] = value
    if not halves:
        raise ConfigError(f"{path} holds no tensors; save the adapter again")
    for module, half in halves.items():
        if len(half) != 2:
            raise ConfigError(
                f"{path}: {module} has no lora_{'B' if 'A' in half else 'A'}.weight; save the adapter again"
            )
        a, b = half["A"], half["B"]
        rank, scale = scaling.of(module)
        if a.shape[0] != rank or b.shape[1] != rank:
            raise ConfigError(
                f"{path}: lora_A and lora_B of {module} have shapes {list(a.shape)} and {list(b.shape)}, {scaling.source} makes "
                f"their rank {rank}"
            )
        name = f"model.{module}.weight" if module.startswith(_ROOTS) else f"{module}.weight"
        yield name, LowRank(a, b * np.float32(scale))


def _plain_file(folder: Path, name: str) -> Path:
    """A file of the folder; a link is followed only where Hugging Face's cache has them, from a snapshot to its blobs."""
    path = folder / name
    if path.is_symlink():
        snapshots = folder.resolve().parent
        if snapshots.name != "snapshots" or path.resolve().parent != snapshots.parent / "blobs":
            raise ConfigError(f"{path} is a link that leaves its folder; replace it by the file it points to")
    if not path.is_file():
        raise ConfigError(f"{path} is missing or no plain file; give a folder in which PEFT saved a LoRA adapter")
    return path


def _shown(value: object) -> str:
    """A value as a message quotes it."""
    text = json.dumps(value) if not isinstance(value, dict | list) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
