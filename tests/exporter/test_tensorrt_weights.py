"""Matrices in the formats of TensorRT's Q/DQ nodes, and the measured ranges that float8 scales come from."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from qwenrt.exporter import ModelConfig, open_checkpoint
from qwenrt.exporter.calibration import calibration_tokens, measure_ranges
from qwenrt.exporter.lower.tensorrt_weights import Float8Channels, Float8Matrix, Int4Groups
from qwenrt.plugins import ConfigError

from .eager import empty_caches, load_module, make_step, run

Floats = npt.NDArray[np.float32]
SCALE_TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def gaussian(rows: int, columns: int, size: float = 0.02) -> Floats:
    return (np.random.default_rng(0).standard_normal((rows, columns)) * size).astype(np.float32)


def floats(bits: npt.NDArray[np.generic], dtype: str) -> Floats:
    return bits.view(SCALE_TYPES[dtype]).astype(np.float32)


@pytest.mark.parametrize("dtype", SCALE_TYPES)
def test_float8_channels_reach_from_their_largest_to_its_smallest(dtype: str) -> None:
    weight = gaussian(5, 256) * np.array([[1], [1e-3], [50], [0], [1]], np.float32)
    codes, scale = Float8Channels(("w", "s"), dtype).encode(weight)
    decoded = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * floats(scale, dtype)[:, None]
    assert np.all(np.isfinite(decoded))
    assert np.all(decoded[3] == 0)
    # Three bits after the point: half of the last of them, of the value or of the smallest normal one.
    scales = floats(scale, dtype)[:, None]
    assert np.all(np.abs(decoded - weight) <= np.maximum(np.abs(weight) * 2**-4, scales * 2**-10) * 1.01)
    assert np.abs(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)).max(axis=1)[[0, 1, 2]] == pytest.approx(448)


def test_float8_clips_what_its_scale_does_not_cover() -> None:
    (codes,) = Float8Matrix(("w",), 0.5).encode(np.array([[1000, -1000, 224, 0.5]], np.float32))
    assert codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist() == [[448, -448, 448, 1]]


@pytest.mark.parametrize("dtype", SCALE_TYPES)
@pytest.mark.parametrize("group_size", [64, 128])
def test_int4_lies_two_in_a_byte_the_first_in_the_low_half(dtype: str, group_size: int) -> None:
    weight = gaussian(6, 256)
    weight[2] = 0
    packed, scale = Int4Groups(("w", "s"), dtype, group_size).encode(weight)
    assert packed.shape == (6, 128)
    assert packed.dtype == np.uint8
    codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(6, 256).astype(np.int8)
    codes = np.where(codes > 7, codes - 16, codes)
    assert (codes.min(), codes.max()) == (-8, 7)
    decoded = codes * floats(scale, dtype).repeat(group_size, axis=1)
    error = np.linalg.norm(decoded - weight) / np.linalg.norm(weight)
    assert error < 0.12  # one scale for 64 or 128 gaussian numbers of 4 bits
    assert np.all(decoded[2] == 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_refused(value: float) -> None:
    weight = gaussian(2, 64)
    weight[1, 3] = value
    for encoding in (
        Float8Matrix(("w",), 1.0),
        Float8Channels(("w", "s"), "bfloat16"),
        Int4Groups(("w", "s"), "bfloat16", 64),
    ):
        with pytest.raises(ConfigError, match="a weight is NaN or infinite"):
            encoding.encode(weight)


def test_ranges_are_the_largest_inputs_and_weights_of_every_projection(tiny_checkpoint: Path) -> None:
    sequences = [[1, 2, 3, 4, 5, 6, 7], [300, 200, 100], [9]]
    ranges = measure_ranges(
        ModelConfig.from_dir(tiny_checkpoint), open_checkpoint(tiny_checkpoint), sequences, lambda done, total: None
    )
    module = load_module(tiny_checkpoint, block_size=8)
    expected: dict[str, float] = {}
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Linear):
            child.register_forward_pre_hook(
                lambda child, arguments, name=name: expected.update({name: float(arguments[0].abs().max())})
            )
    step = make_step([(ids, 0) for ids in sequences], np.array([[2], [0], [1]], np.int32))
    run(module, step, empty_caches(module, 3, 8))
    assert ranges.inputs == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 4 * 4
    assert ranges.weights == {name: module.get_submodule(name).weight.abs().max().item() for name in expected}


def test_the_calibration_text_has_many_kinds_of_tokens(tiny_checkpoint: Path) -> None:
    sequences = calibration_tokens(tiny_checkpoint / "tokenizer.json")
    assert len(sequences) > 10
    assert all(0 < len(sequence) <= 128 for sequence in sequences)
    assert sum(map(len, sequences)) > 1000
    assert len({token for sequence in sequences for token in sequence}) > 100
