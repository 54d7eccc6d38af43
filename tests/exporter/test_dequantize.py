"""Quantised layouts, decoded to the bit: against codes that were packed one by one, and against the formats' own libraries."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from qwenrt.exporter import export
from qwenrt.exporter.dequantize import find_layout
from qwenrt.exporter.json_fields import Fields
from qwenrt.exporter.quantization_config import Quantization
from qwenrt.exporter.quantized_weight import Part, QuantizedWeight
from qwenrt.exporter.safetensors_file import TensorInfo
from qwenrt.plugins import ConfigError
from tests.checkpoints import quantize_checkpoint, write_checkpoint
from tests.packing import Array, Tensors, awq, fp8, fp8_value, gptq, packed, random_codes

_CODES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.int8): "I8",
}
_BITS = {"BF16": np.uint16, "F8_E4M3": np.uint8}


def quantized_weight(tensors: Tensors, quantization: Quantization, shape: tuple[int, int]) -> QuantizedWeight:
    """The matrix of a module's tensors."""
    parts = {}
    for name, array in tensors.items():
        code = _CODES[array.dtype]
        stored = array.view(_BITS.get(code, array.dtype))
        info = TensorInfo(Path("model.safetensors"), 0, stored.nbytes, code, stored.shape)
        parts[name] = Part(info, lambda stored=stored: stored)  # type: ignore[misc]
    layout = find_layout(parts, quantization)
    assert layout is not None
    return layout("layer", parts, shape, quantization)


def decode(tensors: Tensors, quantization: Quantization, shape: tuple[int, int]) -> Array:
    """What they stand for."""
    return quantized_weight(tensors, quantization, shape).decode()


def refused(tensors: Tensors, quantization: Quantization, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        decode(tensors, quantization, shape)
    assert "\n" not in str(caught.value)


FP8 = Quantization(method="fp8", block=(128, 128))
GPTQ = Quantization(method="gptq", bits=4, group_size=32, zero_offset=1)
AWQ = Quantization(method="awq", bits=4, group_size=32)


class TestFp8:
    """Case L09."""

    def test_a_scale_multiplies_its_block(self) -> None:
        scales = np.array([[0.5, 2], [4, 8]], np.float32)
        found = decode(fp8(np.ones((192, 200)), scales), FP8, (192, 200))
        for rows, columns, value in (
            (slice(0, 128), slice(0, 128), 0.5),
            (slice(0, 128), slice(128, 200), 2),
            (slice(128, 192), slice(0, 128), 4),
            (slice(128, 192), slice(128, 200), 8),
        ):
            assert (found[rows, columns] == value).all()

    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
    def test_every_code_of_every_block(self, dtype: Any) -> None:
        codes = np.resize(np.arange(256, dtype=np.uint8), (150, 300)).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        scales = np.random.default_rng(0).uniform(0.001, 1, (3, 5)).astype(dtype)
        tensors = fp8(np.nan_to_num(codes), scales)
        quantization = Quantization(method="fp8", block=(64, 64))
        np.testing.assert_array_equal(decode(tensors, quantization, (150, 300)), fp8_value(tensors, (64, 64)))

    def test_equal_to_transformers(self) -> None:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        rng = np.random.default_rng(1)
        tensors = fp8(rng.standard_normal((256, 384)), rng.uniform(0.01, 1, (2, 3)).astype(np.float32))
        expected = Fp8Dequantize(None)._dequantize_one(
            torch.from_numpy(tensors["weight"].view(np.uint8)).view(torch.float8_e4m3fn),
            torch.from_numpy(tensors["weight_scale_inv"]),
            torch.float32,
        )
        np.testing.assert_array_equal(decode(tensors, FP8, (256, 384)), expected.numpy())

    @pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
    @pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
    def test_one_scale_for_the_whole_matrix(self, name: str, shape: tuple[int, ...]) -> None:
        tensors = fp8(np.ones((5, 7)), np.full(shape, 3, np.float32), name)
        for block in ((0, 0), (128, 128)):
            quantization = Quantization(method="fp8", block=block)
            assert (decode(tensors, quantization, (5, 7)) == 3).all()

    def test_what_does_not_fit_is_named(self) -> None:
        ones = np.ones((192, 200))
        refused(
            {"weight": fp8(ones, ones)["weight"]}, FP8, (192, 200), "layer.weight is F8_E4M3 and has no weight_scale"
        )
        wrong = np.ones((2, 3), np.float32)
        refused(fp8(ones, wrong), FP8, (192, 200), r"weight_scale_inv has shape \[2, 3\], must be \[2, 2\]")
        refused(
            fp8(ones, wrong.astype(np.int32)), FP8, (192, 200), "weight_scale_inv is I32, must be F32 or F16 or BF16"
        )
        refused(fp8(ones, wrong), FP8, (191, 200), r"layer.weight has shape \[192, 200\], must be \[191, 200\]")

    @pytest.mark.parametrize("byte", [0x7F, 0xFF])
    def test_a_nan_among_the_codes(self, byte: int) -> None:
        tensors = fp8(np.ones((4, 4)), np.ones((1, 1), np.float32))
        tensors["weight"].view(np.uint8)[2, 3] = byte
        refused(tensors, FP8, (4, 4), '"layer" holds a NaN; download')

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_a_scale_that_is_no_number(self, value: float) -> None:
        tensors = fp8(np.ones((4, 4)), np.full((1, 1), value, np.float32))
        refused(tensors, FP8, (4, 4), 'a scale of "layer" is no finite number; download')


class TestGptq:
    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("version", [1, 2])
    @pytest.mark.parametrize("symmetric", [False, True])
    @pytest.mark.parametrize("act_order", [False, True])
    @pytest.mark.parametrize("shape", [(8, 32), (24, 96), (40, 72)])
    def test_equals_the_codes(
        self, bits: int, version: int, symmetric: bool, act_order: bool, shape: tuple[int, int]
    ) -> None:
        matrix = random_codes(*shape, bits=bits, symmetric=symmetric, act_order=act_order)
        quantization = Quantization(method="gptq", bits=bits, group_size=32, zero_offset=version == 1)
        found = decode(gptq(matrix, bits=bits, version=version), quantization, shape)
        np.testing.assert_array_equal(found, matrix.value())

    def test_one_group_for_all_columns_and_no_index(self) -> None:
        matrix = random_codes(16, 40, group_size=40)
        quantization = Quantization(method="gptq", bits=4, zero_offset=1)
        np.testing.assert_array_equal(decode(gptq(matrix, g_idx=False), quantization, (16, 40)), matrix.value())

    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
    def test_scales_of_other_types(self, dtype: Any) -> None:
        matrix = random_codes(8, 64, dtype=dtype)
        np.testing.assert_array_equal(decode(gptq(matrix), GPTQ, (8, 64)), matrix.value())

    def test_what_does_not_fit_is_named(self) -> None:
        tensors = gptq(random_codes(8, 64))
        for name, message in (("qzeros", "and no qzeros"), ("scales", "and no scales")):
            refused({k: v for k, v in tensors.items() if k != name}, GPTQ, (8, 64), message)
        refused(
            tensors, Quantization(method="gptq", bits=8, group_size=32), (8, 64), r"qweight has shape \[8, 8\], must be"
        )
        refused(
            tensors, Quantization(method="gptq", bits=4, group_size=64), (8, 64), r"qzeros has shape \[2, 1\], must be"
        )
        refused(
            tensors | {"qweight": tensors["qweight"].astype(np.int64)}, GPTQ, (8, 64), "qweight is I64, must be I32"
        )
        for value in (-1, 2, 2**31 - 1):
            index = tensors["g_idx"].copy()
            index[5] = value
            refused(tensors | {"g_idx": index}, GPTQ, (8, 64), r"g_idx holds .*, must be 0 to 1")


class TestAwq:
    @pytest.mark.parametrize("shape", [(8, 32), (24, 96), (40, 72)])
    def test_equals_the_codes(self, shape: tuple[int, int]) -> None:
        matrix = random_codes(*shape)
        np.testing.assert_array_equal(decode(awq(matrix), AWQ, shape), matrix.value())

    def test_every_row_has_its_place(self) -> None:
        matrix = random_codes(16, 32)
        ramp = np.broadcast_to(np.arange(16)[:, None], (16, 32))
        tensors = awq(type(matrix)(ramp, np.zeros((16, 1), int), np.ones((16, 1), np.float16), matrix.groups))
        np.testing.assert_array_equal(decode(tensors, AWQ, (16, 32)), ramp)
        assert tensors["qweight"][0, 0] == 0x75316420


def test_compressed_columns_may_be_in_any_group() -> None:
    matrix = random_codes(16, 96, symmetric=True, act_order=True, dtype=np.float32)
    quantization = Quantization(method="compressed-tensors", bits=4, group_size=32)
    tensors = {
        "weight_packed": packed(matrix.codes, 4),
        "weight_scale": matrix.scales,
        "weight_g_idx": matrix.groups.astype(np.int32),
        "weight_shape": np.array([16, 96]),
    }
    np.testing.assert_array_equal(decode(tensors, quantization, (16, 96)), matrix.value())
    refused(
        tensors | {"weight_shape": np.array([96, 16])}, quantization, (16, 96), r"weight_shape is \[96, 16\], must be"
    )
    refused(tensors | {"weight_g_idx": np.full(96, 3, np.int32)}, quantization, (16, 96), "weight_g_idx holds 3 to 3")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("layout", "weights", "shape"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, (24, 96)),
        ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}, (20, 64)),
        ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, (19, 45)),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}, (20, 48)),
        ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, (20, 48)),
        ("int-quantized", {"num_bits": 8, "strategy": "group", "group_size": 16}, (20, 48)),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, (20, 48)),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, (20, 48)),
        (
            "naive-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]},
            (32, 48),
        ),
    ],
    ids=str,
)
def test_compressed_tensors_decode_as_the_library_decodes_them(
    layout: str, weights: dict[str, Any], shape: tuple[int, int], symmetric: bool
) -> None:
    if weights.get("type") == "float" and not symmetric:
        return
    torch.manual_seed(0)
    args = QuantizationArgs(**weights, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    rows, columns = shape
    groups = {"group": (rows, columns // (args.group_size or 1)), "channel": (rows, 1), "tensor": (1,)}
    grid = groups.get(str(args.strategy), (rows // 16, columns // 16))
    module = {"weight": torch.randn(shape), "weight_scale": torch.rand(grid) * 0.2 + 0.05}
    if not symmetric:
        low, high = -(1 << args.num_bits - 1), 1 << args.num_bits - 1
        module["weight_zero_point"] = torch.randint(low, high, grid, dtype=torch.int8)
    library = BaseCompressor.get_value_from_registry(layout)
    stored = library.compress(module, scheme)
    expected = library.decompress(stored, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"weights": weights}},
    }
    quantization = Quantization.from_fields(Fields({"quantization_config": config}, "config.json"))
    assert quantization is not None
    found = decode({name: _numpy(value) for name, value in stored.items()}, quantization, shape)
    np.testing.assert_array_equal(found, expected.numpy())


def _numpy(value: torch.Tensor) -> Array:
    if value.dtype == torch.float8_e4m3fn:
        return value.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return value.numpy()


@pytest.mark.parametrize(
    ("kind", "weights", "message"),
    [
        ("w8a8", "int8", "8 matrices of compressed-tensors, 8 bits became int8 exactly"),
        (
            "awq",
            "int4",
            r"8 matrices of awq, 4 bits, groups of 32 became int4 with a relative error of \d\d?\.\d\d% \(model",
        ),
        ("gptq", "int8", r"8 matrices of gptq, .* became int8 with a relative error of 0\.\d\d% \(model"),
        ("fp8", "float32", None),
    ],
)
def test_what_becomes_of_integers_is_told(kind: str, weights: str, message: str | None, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=2)
    quantize_checkpoint(checkpoint, tmp_path / "reference", kind)
    lines: list[str] = []
    export(checkpoint, tmp_path / "engine", weights=weights, notice=lines.append)
    if message is None:
        assert lines == []
    else:
        assert re.fullmatch(message + ".*", lines.pop())
        assert lines == []
