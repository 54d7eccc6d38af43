"""ModelConfig: what a checkpoint's JSON files say about the decoder, typed and validated."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from qwenrt.plugins import ConfigError

from .experts import ExpertsSpec
from .families import TASKS, Family, architecture_of
from .folder import checked_folder, plain_file
from .json_fields import Fields, read_config, read_json_object
from .pooling_modules import pools_last_token
from .quantization_config import Quantization
from .rope import RopeSpec

_DTYPES = {
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
    "float16": "float16",
    "half": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
_MAX_LAYERS = 1024
_MAX_LABELS = 1024
_MAX_LABEL_CHARS = 256
MAX_POSITIONS = 1 << 22
"""Most positions that a RoPE table is made for, whatever a config.json says."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of one of the supported families; sizes are in elements.

    `attention_bias`, `output_bias` and `mlp_bias` tell whether q, k and v, whether o, and whether the MLP's projections have
    biases, `qk_norm` whether heads of q and k are normalised; `experts` is None where no layer has any. `sliding_windows` has
    one entry a layer: the number of positions that a token attends to, itself included, or -1 for all. `head_dim_is_default`
    tells that config.json names none. `dtype` is what config.json says its weights are, or None; the weights' own headers
    decide. `eos_token_ids` come from generation_config.json, else config.json, else the tokenizer. `task` is what the graph is
    made for and so what it ends in: generate in lm_head, classify in the score head of as many rows as there are `labels`, embed
    in the final norm.
    """

    architecture: str
    task: str
    labels: tuple[str, ...]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_is_default: bool
    vocab_size: int
    max_position_embeddings: int
    rope: RopeSpec
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    experts: ExpertsSpec | None
    sliding_windows: tuple[int, ...]
    quantization: Quantization | None
    dtype: str | None
    eos_token_ids: tuple[int, ...]

    @property
    def max_positions(self) -> int:
        """The longest sequence: max_position_embeddings, or what RoPE scaling extends it to if that is more."""
        return max(self.max_position_embeddings, self.rope.scaled_positions)

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; the value heads have the same."""
        return self.num_kv_heads * self.head_dim

    @property
    def has_lm_head(self) -> bool:
        """Whether lm_head is a matrix of its own."""
        return self.task == "generate" and not self.tie_word_embeddings

    @classmethod
    def from_dir(cls, folder: str | os.PathLike[str], task: str | None = None) -> ModelConfig:
        """Read a checkpoint folder's config.json, generation_config.json and, for lack of an EOS there, tokenizer files.

        task: what it is to be used for; by default what its architecture says, or embed where sentence-transformers' modules.json
        pools it. Raises ConfigError if it cannot be used so.
        """
        path = checked_folder(folder)
        fields = read_config(plain_file(path, "config.json"))
        config = cls.from_dict(fields.values, source=fields.source)
        pooled = task in (None, "embed") and pools_last_token(path)
        config = config.for_task(task or ("embed" if pooled else config.task))
        eos = None
        if os.path.lexists(path / "generation_config.json"):
            eos = _token_ids(read_config(plain_file(path, "generation_config.json")), config.vocab_size)
        if eos is None and not config.eos_token_ids:
            eos = _tokenizer_eos(path, config.vocab_size)
        return config if eos is None else dataclasses.replace(config, eos_token_ids=eos)

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, source: str = "config.json") -> ModelConfig:
        """Validate the contents of a config.json; raises ConfigError naming the field, its value and what is allowed."""
        fields = Fields(values, source)
        family, architecture = architecture_of(fields)
        task = _tasks_of(architecture)[0]
        fields.choice("hidden_act", ("silu",), "silu")
        if not fields.boolean("is_causal", True) or fields.boolean("use_bidirectional_attention", False):
            raise ConfigError(
                f"{fields.source}: attention is not causal, which is not supported; use a causal checkpoint"
            )
        num_layers = fields.integer("num_hidden_layers", high=_MAX_LAYERS)
        hidden_size = fields.integer("hidden_size", high=1 << 20)
        num_heads, num_kv_heads, head_dim = _heads(fields, family, hidden_size)
        positions = fields.integer("max_position_embeddings", family.default_positions, high=MAX_POSITIONS)
        attention_bias = fields.boolean("attention_bias", False)
        vocab_size = fields.integer("vocab_size", high=1 << 24)
        rope = RopeSpec.from_fields(fields, positions)
        if rope.scaled_positions > MAX_POSITIONS:
            raise ConfigError(
                f"{source}: RoPE scaling by {rope.factor:g} of {rope.original_max_positions} positions makes more than "
                f"{MAX_POSITIONS}; correct factor or original_max_position_embeddings"
            )
        return cls(
            architecture=architecture,
            task=task,
            labels=_labels(fields) if task == "classify" else (),
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", high=1 << 22),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_is_default=not fields.has("head_dim"),
            vocab_size=vocab_size,
            max_position_embeddings=positions,
            rope=rope,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6, low=1e-30, high=1.0),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            attention_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=family.mlp_bias and fields.boolean("mlp_bias", False),
            qk_norm=family.qk_norm,
            experts=ExpertsSpec.from_fields(fields, num_layers) if family.experts else None,
            sliding_windows=_sliding_windows(fields, family, num_layers),
            quantization=Quantization.from_fields(fields),
            dtype=_dtype(fields),
            eos_token_ids=_token_ids(fields, vocab_size) or (),
        )

    def for_task(self, task: str) -> ModelConfig:
        """The same for another task; raises ConfigError if a checkpoint of this architecture has no head for it."""
        tasks = _tasks_of(self.architecture)
        if task not in tasks:
            raise ConfigError(f"task is {task!r}, must be {' or '.join(tasks)} for a {self.architecture}")
        return dataclasses.replace(self, task=task, labels=self.labels if task == "classify" else ())


def _tasks_of(architecture: str) -> tuple[str, ...]:
    """What an architecture's checkpoints can be used for, the usual first."""
    return next(tasks for ending, tasks in TASKS.items() if architecture.endswith(ending))


def _labels(fields: Fields) -> tuple[str, ...]:
    """The names of a classifier's labels: `id2label`, else as many as `num_labels` says, two by default as in transformers."""
    names = fields.values.get("id2label")
    if names is None:
        return tuple(f"LABEL_{index}" for index in range(fields.integer("num_labels", 2, high=_MAX_LABELS)))
    allowed = f'an object of 1 to {_MAX_LABELS} labels with the keys "0", "1" and so on'
    if not isinstance(names, dict) or not 1 <= len(names) <= _MAX_LABELS:
        raise fields.wrong("id2label", allowed)
    labels = [names.get(str(index)) for index in range(len(names))]
    if not all(isinstance(label, str) and len(label) <= _MAX_LABEL_CHARS for label in labels):
        raise fields.wrong("id2label", allowed)
    return tuple(map(str, labels))


def _heads(fields: Fields, family: Family, hidden_size: int) -> tuple[int, int, int]:
    """Number of query heads, number of key/value heads, and elements of a head."""
    num_heads = fields.integer("num_attention_heads", high=65536)
    default = None if "num_key_value_heads" in fields.values else family.default_kv_heads
    if fields.has("num_key_value_heads"):
        num_kv_heads = fields.integer("num_key_value_heads", high=65536)
    else:
        num_kv_heads = default or num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{fields.source}: num_attention_heads is {num_heads}, must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    if fields.has("head_dim"):
        head_dim = fields.integer("head_dim", high=8192)
    elif family.default_head_dim is None and hidden_size % num_heads:
        raise ConfigError(
            f"{fields.source}: hidden_size is {hidden_size}, must be a multiple of num_attention_heads ({num_heads}) where "
            "there is no head_dim"
        )
    else:
        head_dim = family.default_head_dim or hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError(f"{fields.source}: head_dim is {head_dim}, must be even: RoPE rotates pairs")
    return num_heads, num_kv_heads, head_dim


def _sliding_windows(fields: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    if family.sliding_window == "no layer":
        return (-1,) * num_layers
    window = -1
    if fields.boolean("use_sliding_window", False) and not (
        "sliding_window" in fields.values and fields.values["sliding_window"] is None
    ):
        window = fields.integer("sliding_window", 4096)
    if family.sliding_window == "all layers":
        return (window,) * num_layers
    types = fields.values.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 28, low=0) if window > 0 else num_layers
        return tuple(window if layer >= first else -1 for layer in range(num_layers))
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in allowed for kind in types):
        raise fields.wrong("layer_types", f"a list of {num_layers} entries, each {' or '.join(allowed)}")
    if "sliding_attention" in types and window < 0:
        raise ConfigError(
            f"{fields.source}: layer_types has sliding_attention, so use_sliding_window must be true and sliding_window a number"
        )
    return tuple(window if kind == "sliding_attention" else -1 for kind in types)


def _dtype(fields: Fields) -> str | None:
    """`dtype`, else its old name `torch_dtype`, as transformers does."""
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.values.get(name)
    if value is None or value == "auto":
        return None
    found = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
    if found is None:
        raise fields.wrong(name, "float32, float16 or bfloat16")
    return found


def _token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...] | None:
    """`eos_token_id`, an integer or a list of them; None where it is absent or null."""
    value = fields.values.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise fields.wrong("eos_token_id", f"an id below vocab_size ({vocab_size}), or a list of them")
    return tuple(dict.fromkeys(ids))


def _tokenizer_eos(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The id of the tokenizer's eos_token, or nothing where the tokenizer names none."""
    if not (folder / "tokenizer_config.json").exists() or not (folder / "tokenizer.json").exists():
        return ()
    path = plain_file(folder, "tokenizer_config.json")
    token = read_json_object(path).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return ()
    tokenizer = read_json_object(plain_file(folder, "tokenizer.json"))
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    ids = dict(model["vocab"]) if isinstance(model, dict) and isinstance(model.get("vocab"), dict) else {}
    if isinstance(added, list):
        entries = [entry for entry in added if isinstance(entry, dict) and isinstance(entry.get("content"), str)]
        ids |= {entry["content"]: entry.get("id") for entry in entries}
    found = ids.get(text) if isinstance(text, str) else None
    if type(found) is not int or not 0 <= found < vocab_size:
        raise ConfigError(
            f"{path}: eos_token is {json.dumps(text)[:60]}, which is no token of tokenizer.json below {vocab_size}; "
            "name eos_token_id in generation_config.json"
        )
    return (found,)
