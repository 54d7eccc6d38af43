"""RoPE tables: transformers' frequencies for every kind, the numbers of public bug reports, precision far out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from qwenrt.exporter.json_fields import Fields
from qwenrt.exporter.rope import RopeSpec
from qwenrt.plugins import ConfigError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn, old spelling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, own attention factor": {**YARN, "attention_factor": 1.7},
    "yarn, own betas": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, short original": {**YARN, "original_max_position_embeddings": 64},
    "llama3": LLAMA3,
}


def spec(rope_scaling: dict[str, Any] | None, theta: float = 1e6, max_positions: int = 131072) -> RopeSpec:
    return RopeSpec.from_fields(
        Fields({"rope_theta": theta, "rope_scaling": rope_scaling}, "config.json"), max_positions
    )


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_and_factor_are_those_of_transformers(kind: str, head_dim: int) -> None:
    scaling = SCALINGS[kind]
    config = Qwen3Config(
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_theta=1e6,
        rope_scaling=None if scaling is None else dict(scaling),
    )
    expected = Qwen3RotaryEmbedding(config)
    found = spec(scaling)
    np.testing.assert_allclose(found.inverse_frequencies(head_dim), expected.inv_freq.numpy(), rtol=2e-6)
    assert found.attention_factor == pytest.approx(expected.attention_scaling, rel=1e-7)
    cos, sin = expected(torch.zeros(1), torch.arange(50)[None])
    table = found.table(50, head_dim)
    np.testing.assert_allclose(table[:, : head_dim // 2], cos[0, :, : head_dim // 2], atol=2e-5)
    np.testing.assert_allclose(table[:, head_dim // 2 :], sin[0, :, : head_dim // 2], atol=2e-5)


def test_yarn_has_the_numbers_worked_out_by_hand() -> None:
    """Case L04: the factor on cos and sin, and frequencies between the two corrections."""
    yarn = spec(YARN)
    frequencies = yarn.inverse_frequencies(128)
    plain = spec(None).inverse_frequencies(128)
    assert yarn.attention_factor == pytest.approx(1.1386294, abs=1e-7)
    for index, expected, unscaled in (
        (0, 1.0, 1.0),
        (24, 5.37532e-3, 5.62341e-3),
        (31, 8.0296e-4, 1.24094e-3),
        (63, 3.10234e-7, 1.24094e-6),
    ):
        assert frequencies[index] == pytest.approx(expected, rel=1e-5)
        assert plain[index] == pytest.approx(unscaled, rel=1e-5)
    changed = np.flatnonzero(~np.isclose(frequencies, plain, rtol=1e-12))
    assert changed[0] == 24, "pairs up to 23 keep their frequency"
    quartered = np.flatnonzero(np.isclose(frequencies, plain / 4, rtol=1e-12))
    assert quartered[0] == 40, "pairs from 40 on are interpolated whole"
    assert yarn.table(1, 128)[0, 0] == np.float32(1.1386294), "the factor changes position 0 already"


@pytest.mark.parametrize("length", [100, 1024, 1025, 3000])
def test_dynamic_scaling_takes_the_frequencies_of_the_longest_sequence(length: int) -> None:
    config = Qwen3Config(
        head_dim=64, max_position_embeddings=1024, rope_theta=1e6, rope_scaling={"rope_type": "dynamic", "factor": 3.0}
    )
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    table = spec({"rope_type": "dynamic", "factor": 3.0}, max_positions=1024).table(length, 64)
    np.testing.assert_allclose(table, np.concatenate([cos[0, :, :32], sin[0, :, :32]], 1), atol=5e-4)


@pytest.mark.parametrize("position", [0, 1, 255, 257, 1001, 15962, 32767])
def test_tables_are_exact_far_out(position: int) -> None:
    table = spec(None).table(32768, 128)
    assert table.dtype == np.float32
    angles = position * 1e6 ** (-np.arange(64) / 64)
    np.testing.assert_allclose(table[position, :64], np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(table[position, 64:], np.sin(angles), atol=1e-7)


@pytest.mark.parametrize("kind", ["foo", "longrope", "YARN", {"rope_type": "yarn"}, 3, None, ["yarn"]])
def test_other_kinds_are_refused_by_name(kind: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"rope_scaling: rope_type is .*supported are default, linear, dynamic, yarn, llama3"
    ):
        spec({"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5"),
        ({"rope_type": "linear", "factor": "2"}, 'factor is "2"'),
        ({"rope_type": "linear", "factor": True}, "factor is true"),
        (
            {"rope_type": "linear", "factor": 2.0, "attention_factor": 2.0},
            "attention_factor.* means nothing to rope_type linear",
        ),
        ({"rope_type": "yarn", "factor": float("nan")}, "factor is NaN"),
        ({"rope_type": "yarn", "factor": float("inf")}, "factor is Infinity"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({**YARN, "original_max_position_embeddings": 1.5}, "original_max_position_embeddings is 1.5"),
        ({**YARN, "attention_factor": 0}, "attention_factor is 0"),
        ({**YARN, "rope_theta": 0}, "rope_theta is 0"),
        ({**YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({**YARN, "yarn_beta": 3}, "yarn_beta.* means nothing to rope_type yarn"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor is 1.0"),
        ({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}, "low_freq_factor is missing"),
        ("yarn", 'rope_scaling is "yarn"'),
        ([YARN], "rope_scaling is a list"),
    ],
)
def test_wrong_parameters_are_named(scaling: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(scaling)
