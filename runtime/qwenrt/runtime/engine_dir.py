"""The engine folder: what an export leaves and a runtime loads.

`engine.json` (an `EngineManifest`) names every other file with its size and SHA-256. A folder of its final name is complete,
for the exporter's `engine_writer` gives it that at the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import typing
from pathlib import Path
from typing import Any

from qwenrt.plugins import ConfigError
from qwenrt.plugins.schema import INT8_SCALE_BYTES, PAGED_ATTENTION

from .plan import Plan

FORMAT_VERSION = 1
MANIFEST_NAME = "engine.json"
_MAX_MANIFEST_BYTES = 1 << 20
TASKS = ("generate", "embed", "classify")
_EARLIER = {"task": "generate", "labels": [], "max_lora_rank": 0, "tp": 1}
_EARLIER_PLAN = {"rank": 0}
"""What manifests of the same format that were written before these fields mean."""
_MAX_SIZE = 1 << 24
"""Of every dimension and limit: what a runtime allocates for them stays bounded."""
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1}
_HASHED_AT_LOAD_BYTES = 64 << 20
"""Files up to this size are hashed whenever a folder is opened; larger ones (weights) only by `EngineDir.verify`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shape of the decoder that an engine holds; sizes are in elements. Without experts their numbers are 0."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_type: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    num_parameters: int
    num_active_parameters: int
    """Those that one token goes through: without the experts that it does not choose."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one engine accepts at most: sequences and tokens in a step, tokens in a sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size in bytes and SHA-256 (hex) of one file of the folder."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineManifest:
    """The contents of `engine.json`; see DESIGN of the folder in runtime/README.md.

    `task` says what the graph's `logits` are, for each row that is asked for: logits of the vocabulary (generate), the final
    hidden state (embed), or logits of the `labels` (classify). `max_lora_rank` is the rank that adapters may have at run time; 0:
    there is no place for any. `tp` is the number of ranks that the model is split over, each with a graph of its own.
    """

    producer: str
    target: str
    task: str = "generate"
    labels: tuple[str, ...] = ()
    model: ModelSpec
    dtype: str
    weights: str
    kv_dtype: str
    block_size: int
    max_lora_rank: int = 0
    tp: int = 1
    limits: Limits
    eos_token_ids: tuple[int, ...]
    opset: int
    plugin_version: int
    plans: tuple[Plan, ...] = ()
    files: dict[str, FileEntry] = dataclasses.field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def num_logits(self) -> int:
        """Width of a row of the graph's `logits`."""
        return {
            "generate": self.model.vocab_size,
            "embed": self.model.hidden_size,
            "classify": len(self.labels),
        }[self.task]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes in all layers' pools, those of all ranks together."""
        item = _ITEM_BYTES[self.kv_dtype]
        return self.tp * self.model.num_layers * 2 * self.rank_kv_heads * self.kv_row * item

    @property
    def kv_row(self) -> int:
        """Elements of a head's K or V of one token in a pool."""
        return self.model.head_dim + INT8_SCALE_BYTES * (self.kv_dtype == "int8")

    @property
    def rank_kv_heads(self) -> int:
        """K/V heads of one rank: its part of the model's, or one that it shares where there are more ranks than heads."""
        return max(1, self.model.num_kv_heads // self.tp)

    def graph_name(self, rank: int = 0) -> str:
        """The file that holds the graph of a rank."""
        return "model.onnx" if self.tp == 1 else f"model.rank{rank}.onnx"

    def network_name(self, rank: int = 0) -> str:
        """What a plan of this folder is called inside: the same for the same graph and weights only."""
        names = (self.graph_name(rank), "model.safetensors")
        digests = "".join(self.files[name].sha256 for name in names if name in self.files)
        return f"qwenrt-{hashlib.sha256(digests.encode()).hexdigest()[:32]}"

    def to_json(self) -> str:
        """The manifest as indented JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_file(cls, path: Path) -> EngineManifest:
        """Read and check a manifest; raises ConfigError naming the file or the field that is wrong."""
        try:
            if path.stat().st_size > _MAX_MANIFEST_BYTES:
                raise ConfigError(f"{path} is larger than {_MAX_MANIFEST_BYTES} bytes; export the engine again")
            return cls.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; export the engine again") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8; export the engine again") from None

    @classmethod
    def from_json(cls, text: str) -> EngineManifest:
        """Parse and check a manifest; raises ConfigError naming the field that is wrong."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{MANIFEST_NAME} is not JSON ({error}); export the engine again") from None
        version = value.get("format_version") if isinstance(value, dict) else None
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{MANIFEST_NAME}: format_version is {version!r}, this qwenrt reads {FORMAT_VERSION}; export the engine again"
            )
        value = {**_EARLIER, **value}
        if isinstance(plans := value.get("plans"), list):
            value["plans"] = [{**_EARLIER_PLAN, **plan} if isinstance(plan, dict) else plan for plan in plans]
        manifest: EngineManifest = _decode(cls, value, "")
        manifest._check_ranges()
        return manifest

    def _check_ranges(self) -> None:
        positive = {
            f"model.{name}": getattr(self.model, name)
            for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
        }
        positive |= {f"limits.{f.name}": getattr(self.limits, f.name) for f in dataclasses.fields(Limits)}
        positive["block_size"] = self.block_size
        for name, value in positive.items():
            if not 1 <= value <= _MAX_SIZE:
                raise ConfigError(
                    f"{MANIFEST_NAME}: {name} is {value}, must be 1 to {_MAX_SIZE}; export the engine again"
                )
        if not 1 <= self.tp <= self.model.num_heads:
            raise ConfigError(
                f"{MANIFEST_NAME}: tp is {self.tp}, must be 1 to model.num_heads ({self.model.num_heads}); export the engine "
                "again"
            )
        if self.task not in TASKS:
            raise ConfigError(f"{MANIFEST_NAME}: task is {self.task!r}, must be one of {', '.join(TASKS)}")
        if bool(self.labels) != (self.task == "classify"):
            raise ConfigError(f"{MANIFEST_NAME}: there are {len(self.labels)} labels and task is {self.task!r}")
        if self.kv_dtype not in _ITEM_BYTES:
            raise ConfigError(
                f"{MANIFEST_NAME}: kv_dtype is {self.kv_dtype!r}, must be one of {', '.join(_ITEM_BYTES)}"
            )
        for token in self.eos_token_ids:
            if not 0 <= token < self.model.vocab_size:
                raise ConfigError(
                    f"{MANIFEST_NAME}: eos_token_ids holds {token}, the vocabulary has {self.model.vocab_size}"
                )
        for name in self.files:
            if name in ("", ".", "..", MANIFEST_NAME) or any(c in name for c in "/\\\0"):
                raise ConfigError(f"{MANIFEST_NAME}: files holds {name!r}, which is not a plain file name")
        for plan in self.plans:
            try:
                plan.check()
            except ConfigError as error:
                raise ConfigError(f"{MANIFEST_NAME}: {error}; export the engine again") from None
            if not 0 <= plan.rank < self.tp:
                raise ConfigError(f"{MANIFEST_NAME}: rank of {plan.file} is {plan.rank}, tp is {self.tp}")
            if plan.file not in self.files:
                raise ConfigError(f"{MANIFEST_NAME}: plans holds {plan.file!r}, which is not in files")


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Turn a JSON value into `kind`: a dataclass, int, float, str, bool, tuple[X, ...] or dict[str, X]."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(
                f"{MANIFEST_NAME}: {where or 'the top level'} must be an object, not {type(value).__name__}"
            )
        hints = typing.get_type_hints(kind)
        for name in sorted(value.keys() ^ hints.keys()):
            state = "unknown" if name in value else "missing"
            raise ConfigError(f"{MANIFEST_NAME}: field {where}{name} is {state}; export the engine again")
        return kind(**{name: _decode(hints[name], value[name], f"{where}{name}.") for name in hints})  # type: ignore[operator]
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(typing.get_args(kind)[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {name: _decode(typing.get_args(kind)[1], item, f"{where}{name}.") for name, item in value.items()}
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if kind is int and type(value) is int and abs(value) < 2**63:
        return value
    if kind in (str, bool) and type(value) is kind:
        return value
    expected = "a list" if origin is tuple else "an object" if origin is dict else kind.__name__
    raise ConfigError(f"{MANIFEST_NAME}: {where.rstrip('.')} must be {expected}, not {str(value)[:40]!r}")


@dataclasses.dataclass(frozen=True)
class EngineDir:
    """An engine folder whose manifest and file sizes have been checked."""

    path: Path
    manifest: EngineManifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> EngineDir:
        """Read and check a folder; raises ConfigError naming the file that is missing, resized or changed."""
        folder = Path(path)
        manifest_path = folder / MANIFEST_NAME
        if not folder.is_dir():
            raise ConfigError(f"engine folder {folder} does not exist; make one with: qwenrt export MODEL {folder}")
        if not manifest_path.is_file():
            hint = (
                "a checkpoint: run qwenrt export on it first"
                if (folder / "config.json").is_file()
                else "no engine folder"
            )
            raise ConfigError(f"{folder} has no {MANIFEST_NAME}; it is {hint}")
        engine = cls(folder, EngineManifest.from_file(manifest_path))
        version = engine.manifest.plugin_version
        if version != PAGED_ATTENTION.version:
            raise ConfigError(
                f"{folder} was made for PagedAttention version {version}, this qwenrt has {PAGED_ATTENTION.version}; "
                "export the engine again"
            )
        for name, entry in engine.manifest.files.items():
            engine._check_file(name, entry, hashed=entry.size <= _HASHED_AT_LOAD_BYTES)
        return engine

    def verify(self) -> None:
        """Hash every file, weights too; raises ConfigError naming the first that differs from the manifest."""
        for name, entry in self.manifest.files.items():
            self._check_file(name, entry, hashed=True)

    def file(self, name: str) -> Path:
        """Path of a file that the manifest lists; raises ConfigError if it does not."""
        if name not in self.manifest.files:
            raise ConfigError(f"engine folder {self.path} has no {name}; export the engine again")
        return self.path / name

    def _check_file(self, name: str, entry: FileEntry, *, hashed: bool) -> None:
        path = self.path / name
        if path.is_symlink() or not path.is_file():
            raise ConfigError(f"engine file {path} is missing or not a plain file; export the engine again")
        size = path.stat().st_size
        if size != entry.size:
            raise ConfigError(
                f"engine file {path} has {size} bytes, the manifest says {entry.size}; export the engine again"
            )
        if hashed and sha256_of(path) != entry.sha256:
            raise ConfigError(
                f"engine file {path} was changed after the export (SHA-256 differs); export the engine again"
            )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
