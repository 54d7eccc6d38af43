"""ModelConfig: JSON from strangers is a config, or refused in one line that names the field, the value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenrt.exporter import ModelConfig
from qwenrt.plugins import ConfigError
from tests import packing

from .test_config import DROP, LLAMA, MINIMAL, MOE, parse


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
