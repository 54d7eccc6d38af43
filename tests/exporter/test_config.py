"""ModelConfig: every spelling that checkpoints have, and the defaults of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Qwen3Config

from qwenrt.exporter import ModelConfig
from qwenrt.exporter.quantization_config import Quantization
from qwenrt.plugins import ConfigError
from tests import packing

MINIMAL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rope_theta": 1000000.0,
}
DROP = object()
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def parse(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({k: v for k, v in {**MINIMAL, **changes}.items() if v is not DROP})


def theta_of_transformers(tmp_path: Path, values: dict[str, Any]) -> float:
    (tmp_path / "config.json").write_text(json.dumps(values))
    theta: float = Qwen3Config.from_pretrained(tmp_path).rope_parameters["rope_theta"]
    return theta


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"rope_theta": 1000000, "rope_type": "default"}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_theta": 1000000, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_scaling": {}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 1e5, "rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 1e3}},
        {"rope_theta": 1000000},
        {},
    ],
    ids=json.dumps,
)
def test_theta_is_the_one_that_transformers_takes(rope: dict[str, Any], tmp_path: Path) -> None:
    values = {k: v for k, v in MINIMAL.items() if k != "rope_theta"} | rope
    assert ModelConfig.from_dict(values).rope.theta == theta_of_transformers(tmp_path, values)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_yarn_is_read_in_either_place(spelling: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
    rope = parse(rope_theta=DROP, **{spelling: yarn}).rope
    assert (rope.type, rope.factor, rope.original_max_positions, rope.theta) == ("yarn", 4.0, 64, 1e6)
    with pytest.raises(ConfigError, match=f'{spelling}: rope_type is "foo", supported are'):
        parse(**{spelling: {**yarn, "rope_type": "foo"}})


def test_scaling_lengthens_what_a_sequence_may_have() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert parse().max_positions == 256
    assert parse(rope_scaling=yarn).max_positions == 1024
    assert parse(rope_scaling=yarn, max_position_embeddings=4096).max_positions == 4096


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    names = ("head_dim", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "max_position_embeddings")
    missing = {k: v for k, v in MINIMAL.items() if k not in (*names, "rope_theta")}
    (tmp_path / "config.json").write_text(json.dumps(missing))
    expected, found = Qwen3Config.from_pretrained(tmp_path), ModelConfig.from_dict(missing)
    assert {name: getattr(found, name) for name in names} == {name: getattr(expected, name) for name in names}
    assert found.rope.theta == expected.rope_parameters["rope_theta"]
    assert found.head_dim_is_default


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_defaults_of_the_other_families_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    names = ("rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")
    absent = (*names, "head_dim", "num_key_value_heads", "rope_theta", "architectures")
    values = {k: v for k, v in MINIMAL.items() if k not in absent} | {"model_type": family, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(values))
    expected, found = AutoConfig.from_pretrained(tmp_path), ModelConfig.from_dict(values)
    assert {name: getattr(found, name) for name in names} == {name: getattr(expected, name) for name in names}
    assert found.rope.theta == expected.rope_parameters["rope_theta"]
    assert found.num_kv_heads == expected.num_key_value_heads
    assert found.head_dim == 64 // 32


MOE: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (True, True, True, True)),
        ({"mlp_only_layers": [1, 3]}, (True, False, True, False)),
        ({"mlp_only_layers": None, "decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [3, 99, -1], "decoder_sparse_step": 2}, (False, True, False, False)),
    ],
    ids=str,
)
def test_layers_with_experts(fields: dict[str, Any], layers: tuple[bool, ...]) -> None:
    experts = parse(**MOE, **fields).experts
    assert experts is not None
    assert experts.layers == layers


@pytest.mark.parametrize(
    "fields", [{"num_experts": 0}, {"decoder_sparse_step": 5}, {"mlp_only_layers": [0, 1, 2, 3]}], ids=str
)
def test_no_layer_has_experts(fields: dict[str, Any]) -> None:
    assert parse(**MOE, **fields).experts is None


def test_defaults_of_experts_are_those_of_transformers(tmp_path: Path) -> None:
    absent = ("num_key_value_heads", "head_dim", "architectures")
    values = {k: v for k, v in MINIMAL.items() if k not in absent} | {"model_type": "qwen3_moe"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    expected, found = AutoConfig.from_pretrained(tmp_path), ModelConfig.from_dict(values)
    assert found.experts is not None
    assert (found.experts.num_experts, found.experts.top_k) == (expected.num_experts, expected.num_experts_per_tok)
    assert found.experts.intermediate_size == expected.moe_intermediate_size
    assert found.experts.norm_topk_prob == expected.norm_topk_prob
    assert found.num_kv_heads == expected.num_key_value_heads
    assert found.head_dim == 16


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_has_two_names(name: str) -> None:
    experts = parse(**MOE, **{name: 16}).experts
    assert experts is not None
    assert experts.num_experts == 16


@pytest.mark.parametrize(
    ("changes", "biases"),
    [
        ({}, (False, False, False)),
        ({"attention_bias": True, "mlp_bias": True}, (True, True, False)),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, (True, False, False)),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_bias": False}, (True, False, False)),
        (LLAMA, (False, False, False)),
        ({**LLAMA, "attention_bias": True}, (True, True, False)),
        ({**LLAMA, "mlp_bias": True}, (False, False, True)),
        ({**LLAMA, "use_sliding_window": True, "sliding_window": 0}, (False, False, False)),
    ],
    ids=str,
)
def test_biases_are_those_of_the_family(changes: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
    config = parse(**changes)
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == biases


def test_a_missing_number_of_kv_heads_is_what_transformers_takes(tmp_path: Path) -> None:
    values = {k: v for k, v in MINIMAL.items() if k != "num_key_value_heads"} | {"num_attention_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert ModelConfig.from_dict(values).num_kv_heads == Qwen3Config.from_pretrained(tmp_path).num_key_value_heads
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_key_value_heads": None}))
    assert parse(num_key_value_heads=None).num_kv_heads == 4
    assert Qwen3Config.from_pretrained(tmp_path).num_key_value_heads == 64


@pytest.mark.parametrize(
    "window",
    [
        {},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 9},
        {"use_sliding_window": True, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
        {"use_sliding_window": False, "layer_types": ["full_attention"] * 4},
    ],
    ids=json.dumps,
)
def test_windows_are_those_of_transformers(window: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MINIMAL, **window}))
    expected = Qwen3Config.from_pretrained(tmp_path)
    assert parse(**window).sliding_windows == tuple(
        expected.sliding_window if kind == "sliding_attention" else -1 for kind in expected.layer_types
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "bf16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16", "dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16", "dtype": "float32"}, "float32"),
        ({"dtype": "auto"}, None),
        ({"dtype": None}, None),
        ({}, None),
    ],
    ids=json.dumps,
)
def test_dtype_spellings(fields: dict[str, Any], expected: str | None) -> None:
    assert parse(**fields).dtype == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("fp8", Quantization(method="fp8", block=(128, 128))),
        ("awq", Quantization(method="awq", bits=4, group_size=32)),
        ("gptq", Quantization(method="gptq", bits=4, group_size=32, zero_offset=1)),
        ("gptq-int8", Quantization(method="gptq", bits=8, zero_offset=1)),
        ("w8a8", Quantization(method="compressed-tensors")),
        ("w4a16", Quantization(method="compressed-tensors", bits=4, group_size=32)),
    ],
)
def test_quantization_configs_as_the_tools_write_them(kind: str, expected: Quantization) -> None:
    assert parse(quantization_config=packing.CONFIGS[kind]).quantization == expected
    assert parse(compression_config=packing.CONFIGS[kind]).quantization == expected


class TestEndOfText:
    """Case L06: which ids end an answer."""

    @pytest.fixture
    def folder(self, tiny_checkpoint: Path, tmp_path: Path) -> Path:
        copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
        self.set(copy, "config.json", eos_token_id=9)
        return copy

    @staticmethod
    def set(folder: Path, name: str, **values: Any) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    @pytest.mark.parametrize(("value", "expected"), [([7, 5], (7, 5)), (5, (5,)), ([5, 5], (5,)), (None, (9,))])
    def test_generation_config_wins(self, value: Any, expected: tuple[int, ...], folder: Path) -> None:
        self.set(folder, "generation_config.json", eos_token_id=value)
        assert ModelConfig.from_dir(folder).eos_token_ids == expected

    def test_config_json_is_next(self, folder: Path) -> None:
        (folder / "generation_config.json").unlink()
        assert ModelConfig.from_dir(folder).eos_token_ids == (9,)

    @pytest.mark.parametrize("token", ["<|im_start|>", {"content": "<|im_start|>", "special": True}])
    def test_the_tokenizer_is_last(self, token: Any, folder: Path) -> None:
        (folder / "generation_config.json").unlink()
        self.set(folder, "config.json", eos_token_id=None)
        self.set(folder, "tokenizer_config.json", eos_token=token)
        added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        assert ModelConfig.from_dir(folder).eos_token_ids == tuple(
            entry["id"] for entry in added if entry["content"] == "<|im_start|>"
        )

    def test_nobody_may_name_one(self, folder: Path) -> None:
        (folder / "generation_config.json").unlink()
        self.set(folder, "config.json", eos_token_id=None)
        self.set(folder, "tokenizer_config.json", eos_token=None)
        assert ModelConfig.from_dir(folder).eos_token_ids == ()

    def test_a_wrong_one_is_named_with_its_file(self, folder: Path) -> None:
        self.set(folder, "generation_config.json", eos_token_id=[5, 320])
        with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is a list, must be an id below"):
            ModelConfig.from_dir(folder)
        (folder / "generation_config.json").unlink()
        self.set(folder, "config.json", eos_token_id=None)
        self.set(folder, "tokenizer_config.json", eos_token="<|gone|>")
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: eos_token is \"<\|gone\|>\""):
            ModelConfig.from_dir(folder)
