"""Weight formats that TensorRT takes natively, as standard Q/DQ nodes before a Gemm.

    fp8           x -> QuantizeLinear -> DequantizeLinear \\
                  float8 weight ------> DequantizeLinear --> Gemm      a scale for the input, one for the weight
    fp8-channel   the same with a scale for each output channel of the weight
    int4          int4 weight --------> DequantizeLinear --> Gemm      a scale for each 128 (or 64) columns of a row

All are symmetric, and scales have the type that is computed in. A strongly typed network demands nothing else:
https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-with-quantized-types.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qwenrt.plugins import ConfigError

from ..quantize import Int4Weight
from ..safetensors_file import widened
from ..weights import Array, Encoding, rounded_to_bfloat16
from . import Lowered

FORMATS = ("fp8", "fp8-channel", "int4")
_GROUP_SIZES = (128, 64)
_FP8_MAX = 448
"""The largest float8_e4m3fn."""

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Ranges:
    """Largest magnitudes, by name of a projection such as model.layers.3.mlp.down_proj: of its inputs and of its weights."""

    inputs: Mapping[str, float]
    weights: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Float8Matrix:
    """float8_e4m3fn with one scale that is known beforehand: weight = code * scale."""

    names: tuple[str]
    scale: float

    def encode(self, rows: Floats, scales: Floats | None = None) -> tuple[Array, ...]:
        """Codes [n, K], as their bits."""
        return (_float8(rows, np.float32(self.scale)),)


@dataclasses.dataclass(frozen=True)
class Float8Channels:
    """float8_e4m3fn with a scale for each row: weight = code * scale."""

    names: tuple[str, str]
    dtype: str

    def encode(self, rows: Floats, scales: Floats | None = None) -> tuple[Array, ...]:
        """Codes [n, K] as their bits, and scales [n] of `dtype`."""
        bits, scale = _rounded(np.abs(rows).max(axis=1, initial=0) / _FP8_MAX, self.dtype)
        return _float8(rows, scale[:, None]), bits


@dataclasses.dataclass(frozen=True)
class Int4Groups:
    """int4 with a scale for each group of columns: weight = code * scale, codes from -8 to 7."""

    names: tuple[str, str]
    dtype: str
    group_size: int

    def encode(self, rows: Floats, scales: Floats | None = None) -> tuple[Array, ...]:
        """Codes [n, K / 2], two in a byte and the first in its low half, and scales [n, K / group_size] of `dtype`."""
        weight = Int4Weight.encode(rows, group_size=self.group_size, symmetric=True)
        # The codes are 0 to 15 and stand for -8 to 7, which in two's complement differ in the top bit.
        codes = (weight.codes ^ 8).reshape(len(rows), -1, 2)
        return codes[:, :, 0] | codes[:, :, 1] << 4, _rounded(weight.group_scale(), self.dtype)[0]


def quantize(model: ir.Model, weights: str, dtype: str, ranges: Ranges | None) -> Lowered:
    """Put Q/DQ nodes before the Gemms of a graph of `dtype`; the head, whose matrix may be the embedding, stays as it is.

    ranges: for fp8 and fp8-channel. Raises ConfigError if int4 has no group size that suits the matrices.
    """
    graph = model.graph
    head = graph.outputs[0].producer()
    gemms = [node for node in graph if node.op_type == "Gemm" and node is not head]
    quantizer = _Quantizer(graph, dtype)
    group_size = _group_size(gemms) if weights == "int4" else 0
    for gemm in gemms:
        if weights == "int4":
            quantizer.int4_weight(gemm, group_size)
            continue
        assert ranges is not None and gemm.name is not None
        quantizer.float8_input(gemm, ranges.inputs[gemm.name])
        if weights == "fp8":
            quantizer.float8_weight(gemm, ranges.weights[gemm.name])
        else:
            quantizer.float8_weight_channels(gemm)
    return Lowered(quantizer.computed, quantizer.encodings)


class _Quantizer:
    """Edits a graph, and collects where the values of its new initializers come from."""

    def __init__(self, graph: ir.Graph, dtype: str) -> None:
        self.computed: dict[str, Array] = {}
        self.encodings: dict[str, Encoding] = {}
        self._graph = graph
        self._dtype = dtype

    def float8_input(self, gemm: ir.Node, largest: float) -> None:
        """Round the input of a Gemm to float8; what is larger than `largest` becomes that."""
        scale, _ = self._constant_scale(f"{gemm.name}.input.scale", largest)
        name = f"{gemm.name}.input"
        quantized = ir.node(
            "QuantizeLinear",
            [gemm.inputs[0], scale],
            {"output_dtype": ir.DataType.FLOAT8E4M3FN},
            name=f"{name}.quantized",
        )
        self._dequantize_before(gemm, 0, quantized.outputs[0], scale, name, {}, [quantized])

    def float8_weight(self, gemm: ir.Node, largest: float) -> None:
        """Store the matrix of a Gemm in float8 with one scale."""
        weight = _weight(gemm)
        scale, value = self._constant_scale(f"{weight.name}.scale", largest)
        weight.dtype = ir.DataType.FLOAT8E4M3FN
        self._dequantize_before(gemm, 1, weight, scale, weight.name, {})
        self.encodings[weight.name] = Float8Matrix((weight.name,), value)

    def float8_weight_channels(self, gemm: ir.Node) -> None:
        """Store the matrix of a Gemm in float8 with a scale for each output channel."""
        weight = _weight(gemm)
        assert weight.shape is not None
        scale = self._scale(f"{weight.name}.scale", (weight.shape[0],))
        weight.dtype = ir.DataType.FLOAT8E4M3FN
        self._dequantize_before(gemm, 1, weight, scale, weight.name, {"axis": 0})
        self.encodings[weight.name] = Float8Channels((weight.name, scale.name), self._dtype)

    def int4_weight(self, gemm: ir.Node, group_size: int) -> None:
        """Store the matrix of a Gemm in int4 with a scale for each `group_size` columns of a row."""
        weight = _weight(gemm)
        width, depth = weight.shape.numpy()
        scale = self._scale(f"{weight.name}.scale", (width, depth // group_size))
        weight.dtype = ir.DataType.INT4
        self._dequantize_before(gemm, 1, weight, scale, weight.name, {"axis": 1, "block_size": group_size})
        self.encodings[weight.name] = Int4Groups((weight.name, scale.name), self._dtype, group_size)

    def _constant_scale(self, name: str, largest: float) -> tuple[ir.Value, float]:
        """A scalar with which `largest` is the largest float8; also its value, which is rounded to the graph's type."""
        bits, value = _rounded(np.float32(largest) / np.float32(_FP8_MAX), self._dtype)
        self.computed[name] = bits
        return self._scale(name, ()), float(value)

    def _scale(self, name: str, shape: tuple[int, ...]) -> ir.Value:
        element = ir.DataType[self._dtype.upper()]
        scale = ir.Value(name=name, type=ir.TensorType(element), shape=ir.Shape(shape))
        self._graph.initializers[name] = scale
        return scale

    def _dequantize_before(
        self,
        gemm: ir.Node,
        index: int,
        codes: ir.Value,
        scale: ir.Value,
        name: str,
        attributes: dict[str, int],
        before: Sequence[ir.Node] = (),
    ) -> None:
        """Let an input of a Gemm be codes * scale."""
        dequantized = ir.node("DequantizeLinear", [codes, scale], attributes, name=f"{name}.dequantized")
        for node in (*before, dequantized):
            node.outputs[0].name = node.name
        self._graph.insert_before(gemm, [*before, dequantized])
        gemm.replace_input_with(index, dequantized.outputs[0])


def _weight(gemm: ir.Node) -> ir.Value:
    weight = gemm.inputs[1]
    assert weight is not None
    return weight


def _group_size(gemms: Sequence[ir.Node]) -> int:
    """The largest that divides the columns of every matrix."""
    columns = {_weight(gemm).shape[1]: _weight(gemm).name for gemm in gemms}
    for size in _GROUP_SIZES:
        if all(count % size == 0 for count in columns):
            return size
    count, name = next((count, name) for count, name in columns.items() if count % _GROUP_SIZES[-1])
    raise ConfigError(
        f"{name} has {count} columns, which int4 cannot divide into groups of 64 or 128; take weights fp8 or a 16-bit type"
    )


def _float8(rows: Floats, scale: npt.NDArray[np.float32] | np.float32) -> npt.NDArray[np.uint8]:
    """The bits of rows / scale as float8_e4m3fn; what is beyond its range becomes its largest."""
    if not np.isfinite(rows).all():
        raise ConfigError("a weight is NaN or infinite, so the matrix cannot be quantised")
    codes: npt.NDArray[Any] = np.clip(rows / scale, -_FP8_MAX, _FP8_MAX).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8)


def _rounded(scale: Floats | np.float32, dtype: str) -> tuple[Array, Floats]:
    """Scales as they are stored, and their values; 1 where what is scaled is all zeros."""
    scale = np.asarray(np.where(scale > 0, scale, 1), np.float32)
    if dtype == "bfloat16":
        bits = rounded_to_bfloat16(scale)
        return bits, widened(bits)
    half = np.maximum(scale.astype(np.float16), np.finfo(np.float16).smallest_subnormal)
    return half, half.astype(np.float32)
