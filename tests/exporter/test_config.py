"""ModelConfig: every spelling that checkpoints have, the defaults of transformers, and JSON from strangers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
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


def quantized(**fields: Any) -> dict[str, Any]:
    return {"quantization_config": fields}


def compressed(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


SUPPORTED = "supported are fp8, awq, gptq, compressed-tensors"
WRONG_QUANTIZATIONS: list[tuple[dict[str, Any], str]] = [
    ({"bits": 4}, f"quantization_config: quant_method is null, {SUPPORTED}"),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        f'is "bitsandbytes", {SUPPORTED}: its codes .* CUDA kernels',
    ),
    ({"quant_method": ["awq"]}, f"quant_method is a list, {SUPPORTED}"),
    ({"quant_method": "hqq"}, f'quant_method is "hqq", {SUPPORTED}'),
    ({"quant_method": "fp8", "fmt": "e5m2"}, 'fmt is "e5m2", must be "e4m3"'),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is a list, must be two positive integers"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size is a list"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, 'version is "gemv", must be "gemm"'),
    ({"quant_method": "awq", "bits": 8}, "bits is 8, must be 4"),
    ({"quant_method": "awq", "w_bit": 3}, "w_bit is 3, must be 4"),
    ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size is 0, must be -1 or a positive integer"),
    ({"quant_method": "gptq"}, "bits is missing, must be an integer"),
    ({"quant_method": "gptq", "bits": 3}, "bits is 3, must be 4 or 8"),
    ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size is -2"),
    (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        'checkpoint_format is "marlin", must be "gptq" or',
    ),
    ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
    ({**compressed(), "format": "nvfp4-pack-quantized"}, 'format is "nvfp4-pack-quantized"'),
    (
        {**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}},
        'sparsity_config: format is "sparse-24-bitmask"',
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"a": None}},
        "config_groups: a is null, must be an object",
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}},
        "a is an object, must be an object",
    ),
    (compressed(num_bits=2), "num_bits is 2, must be 4 or 8"),
    (compressed(num_bits=4, type="float"), "num_bits is 4, must be 8"),
    (compressed(num_bits=4, strategy="tensor_group"), 'strategy is "tensor_group", must be "tensor" or "channel"'),
    (compressed(num_bits=4, strategy="group"), "group_size is missing"),
    (compressed(num_bits=8, strategy="block"), "block_structure is missing, must be two positive integers"),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}}},
        },
        "config_groups has 2 different schemes for weights, one is supported",
    ),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            '"MistralForCausalLM" is not supported; supported are Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen2For',
        ),
        ({"architectures": DROP, "model_type": "gemma"}, 'model_type is "gemma"; supported are Qwen3ForCausalLM'),
        ({"architectures": DROP, "model_type": DROP}, "no architectures, and model_type is null"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures is .*must be a list of names"),
        ({"architectures": [1]}, "architectures is a list, must be a list of names"),
        ({"model_type": "llama"}, 'model_type is "llama", must be "qwen3"'),
        *((quantized(**fields), message) for fields, message in WRONG_QUANTIZATIONS),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", must be "silu"'),
        ({"hidden_size": DROP}, "hidden_size is missing, must be an integer from 1"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"hidden_size": "64"}, 'hidden_size is "64"'),
        ({"hidden_size": True}, "hidden_size is true"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"hidden_size": 2**63}, "hidden_size is 9223372036854775808"),
        ({"hidden_size": [64]}, "hidden_size is a list"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers is 100000, must be an integer from 1 to 1024"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3, must be a multiple of num_key_value_heads .2."),
        ({"head_dim": 33}, "head_dim is 33, must be even"),
        ({"head_dim": 0}, "head_dim is 0"),
        (
            {**MOE, "num_experts_per_tok": 9, "num_experts": 8},
            "num_experts_per_tok is 9, must be an integer from 1 to 8",
        ),
        ({**MOE, "num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({**MOE, "num_experts": 2**20}, "num_experts is 1048576"),
        ({**MOE, "num_experts": 20000}, "num_experts is 20000 in 4 layers, at most 65536 experts in all layers"),
        ({**MOE, "mlp_only_layers": 3}, "mlp_only_layers is 3, must be a list of layer numbers"),
        ({**MOE, "mlp_only_layers": [1.0]}, "mlp_only_layers is a list"),
        ({**MOE, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({**MOE, "moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ({**MOE, "norm_topk_prob": 1}, "norm_topk_prob is 1, must be true or false"),
        (
            {**LLAMA, "head_dim": DROP, "hidden_size": 66},
            "hidden_size is 66, must be a multiple of num_attention_heads",
        ),
        ({**LLAMA, "head_dim": DROP, "hidden_size": 12}, "head_dim is 3, must be even"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_theta": "1e6"}, 'rope_theta is "1e6"'),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, must be true or false"),
        ({"attention_bias": "true"}, 'attention_bias is "true"'),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 1e6}},
            "RoPE scaling by 1e.06 of 256 positions makes more than",
        ),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776"),
        ({"layer_types": ["full_attention"]}, "layer_types is a list, must be a list of 4 entries"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types is a list"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types has sliding_attention"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"dtype": "int8"}, 'dtype is "int8", must be float32, float16 or bfloat16'),
        ({"dtype": "float64"}, 'dtype is "float64"'),
        ({"torch_dtype": 16}, "torch_dtype is 16"),
        ({"eos_token_id": 320}, "eos_token_id is 320, must be an id below vocab_size .320."),
        ({"eos_token_id": [1, -1]}, "eos_token_id is a list"),
        ({"eos_token_id": 1.5}, "eos_token_id is 1.5"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_fields_are_named_with_value_and_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(**changes)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "truncate": True,
}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**70, 10**400),
    *(0.0, -0.0, 1.5, 5e-324, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "x", "\0", "\ud800", "1" * 1000),
    *([], [1], [None], [[]], ["full_attention"] * 4, {}, {"a": 1}, {"rope_type": ["x"]}),
    {"rope_type": "yarn", "factor": 1e6, "original_max_position_embeddings": 1},
    {"rope_type": "linear", "factor": 1e6},
)


def test_any_value_of_any_field_is_a_config_or_a_config_error() -> None:
    extra = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "hidden_act": "silu",
        "dtype": "float32",
    }
    defaults = {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": 1,
        "layer_types": None,
    }
    base = {**MINIMAL, **extra, **defaults, "quantization_config": None, "rope_scaling": ROPE, "rope_parameters": None}
    kinds = packing.CONFIGS.values()
    cases = [{**base, name: value} for name in base for value in ODD]
    cases += [{**base, "rope_scaling": {**ROPE, name: value}} for name in (*ROPE, "attention_factor") for value in ODD]
    cases += [
        {**base, "quantization_config": {**kind, name: value}} for kind in kinds for name in kind for value in ODD
    ]
    for case in cases:
        try:
            config = ModelConfig.from_dict(case)
        except ConfigError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert len(str(error)) < 400  # noqa: PT017
        else:
            assert np.isfinite(config.rope.table(16, 32)).all()
            assert 1 <= config.max_positions <= 2**22


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[]", "must hold a JSON object"),
        (b"[" * 10_000, "nested too deeply"),
        (b'{"a":' * 10_000, "nested too deeply"),
        (b'{"hidden_size": 1, "hidden_size": 2}', 'has the key "hidden_size" twice'),
        (b'{"hidden_size": 1' + b"0" * 5000 + b"}", "is not JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_that_is_no_config_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_dir(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_missing_folder_and_a_missing_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint folder .* does not exist"):
        ModelConfig.from_dir(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        ModelConfig.from_dir(tmp_path)
