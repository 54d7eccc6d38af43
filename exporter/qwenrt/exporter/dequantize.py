"""The layouts that quantised checkpoints have their matrices in.

Where each layout is defined:
fp8                 https://huggingface.co/docs/transformers/quantization/finegrained_fp8: F8_E4M3 codes, a scale for each block
awq                 AutoAWQ, version "gemm": eight 4-bit codes in an int32 along the rows, in the order 0 2 4 6 1 3 5 7
gptq                AutoGPTQ: codes in an int32 along the columns, `g_idx` with the group of each column
compressed-tensors  https://github.com/neuralmagic/compressed-tensors: signed codes, packed along the columns or one a byte
gguf                https://github.com/ggml-org/ggml: blocks of 32 or 256 columns, decoded by the package gguf
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

from . import gguf_blocks
from .gguf_file import BLOCK_TYPES
from .integers import IntegerFormat, Integers
from .json_fields import shown
from .quantization_config import Quantization
from .quantized_weight import CHUNK_ELEMENTS, AffineWeight, Array, Floats, Part, QuantizedWeight
from .safetensors_file import DTYPES

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOATS = tuple(DTYPES)


class ScaledWeight(AffineWeight):
    """Codes one a byte, F8_E4M3 or int8; a scale for all of the matrix, or for its rows, groups of columns, or blocks."""

    required = ("weight",)
    optional = ("weight_scale_inv", "weight_scale", "weight_zero_point")

    def check(self) -> None:
        self.scale = next((name for name in self.optional[:2] if name in self.parts), "")
        if not self.scale:
            raise ConfigError(
                f"{self.file}: {self.module}.weight is {self.parts['weight'].info.dtype} and has no weight_scale_inv or "
                "weight_scale; download the checkpoint again"
            )
        rows, columns = self.shape
        self.expect("weight", ("F8_E4M3", "I8"), self.shape)
        block_rows, block_columns = self.quantization.block
        grid = (rows, -(-columns // (self.quantization.group_size or columns)))
        if block_rows:
            grid = (-(-rows // block_rows), -(-columns // block_columns))
        self.expect(self.scale, _FLOATS, grid, (1, 1), (1,), ())
        self.one_scale = math.prod(self.parts[self.scale].info.shape) == 1
        if "weight_zero_point" in self.parts:
            self.expect("weight_zero_point", ("I8",), self.parts[self.scale].info.shape)

    def codes(self, first: int, last: int) -> Array:
        codes: Array = self.parts["weight"].read()[first:last]
        return codes.view(ml_dtypes.float8_e4m3fn) if codes.dtype == np.uint8 else codes

    def integer_format(self) -> IntegerFormat:
        if self.parts["weight"].info.dtype == "F8_E4M3":
            raise self.not_kept("is of 8-bit floats")
        return super().integer_format()

    @property
    def bits(self) -> int:
        return 8

    @property
    def lowest(self) -> int:
        return -128

    def scales(self) -> Floats:
        return self._grid(self.floats(self.scale))

    def zero_points(self) -> Floats | None:
        if "weight_zero_point" not in self.parts:
            return None
        return self._grid(self.parts["weight_zero_point"].read().astype(np.float32))

    def _grid(self, values: Floats) -> Floats:
        return values.reshape(1, 1) if self.one_scale else values

    @property
    def rows_per_scale(self) -> int:
        return self.shape[0] if self.one_scale else self.quantization.block[0] or 1

    def column_groups(self) -> Array:
        columns = self.shape[1]
        size = self.quantization.block[1] or self.quantization.group_size
        return np.arange(columns) // (columns if self.one_scale or not size else size)


class _PackedWeight(AffineWeight):
    """Codes of 4 or 8 bits in int32 words, and a scale for each row and group of columns."""

    index: ClassVar[str] = "g_idx"
    """The part with each column's group, where a checkpoint has it."""

    @property
    def per_word(self) -> int:
        """Codes in an int32."""
        return 32 // self.quantization.bits

    @property
    def num_groups(self) -> int:
        """Groups of columns."""
        return -(-self.shape[1] // self.group_size)

    @property
    def group_size(self) -> int:
        """Columns in a group."""
        return self.quantization.group_size or self.shape[1]

    def column_groups(self) -> Array:
        columns, groups = self.shape[1], self.num_groups
        if self.index not in self.parts:
            return np.arange(columns) // self.group_size
        index = self.parts[self.index].read()
        if not 0 <= index.min() <= index.max() < groups:
            raise ConfigError(
                f"{self.file}: {self.module}.{self.index} holds {index.min()} to {index.max()}, must be 0 to {groups - 1}"
            )
        return index


class GptqWeight(_PackedWeight):
    """Codes packed along the columns, the words' matrix lying on its side."""

    required = ("qweight", "qzeros", "scales")
    optional = ("g_idx",)
    unit = 8

    def check(self) -> None:
        rows, columns = self.shape
        self.expect("qweight", ("I32",), (-(-columns // self.per_word), rows))
        self.expect("qzeros", ("I32",), (self.num_groups, -(-rows // self.per_word)))
        self.expect("scales", _FLOATS, (self.num_groups, rows))
        if "g_idx" in self.parts:
            self.expect("g_idx", ("I32",), (columns,))

    def codes(self, first: int, last: int) -> Array:
        words = self.parts["qweight"].read()[:, first:last]
        return unpack(words.T, self.quantization.bits)[:, : self.shape[1]]

    def scales(self) -> Floats:
        return self.floats("scales").T

    def zero_points(self) -> Floats | None:
        bits = self.quantization.bits
        zeros = unpack(self.parts["qzeros"].read(), bits)[:, : self.shape[0]]
        # The offset wraps around within a code, as in AutoGPTQ's own PyTorch kernel.
        return ((zeros + np.uint8(self.quantization.zero_offset)) & np.uint8((1 << bits) - 1)).T.astype(np.float32)


class AwqWeight(_PackedWeight):
    """Codes packed along the rows in an order of their own, the matrix lying on its side."""

    required = ("qweight", "qzeros", "scales")
    unit = 8

    def check(self) -> None:
        rows, columns = self.shape
        self.expect("qweight", ("I32",), (columns, -(-rows // 8)))
        self.expect("qzeros", ("I32",), (self.num_groups, -(-rows // 8)))
        self.expect("scales", _FLOATS, (self.num_groups, rows))

    def codes(self, first: int, last: int) -> Array:
        words = self.parts["qweight"].read()[:, first // 8 : -(-last // 8)]
        return _in_awq_order(unpack(words, 4))[:, : last - first].T

    def scales(self) -> Floats:
        return self.floats("scales").T

    def zero_points(self) -> Floats | None:
        zeros = _in_awq_order(unpack(self.parts["qzeros"].read(), 4))
        return zeros[:, : self.shape[0]].T.astype(np.float32)


class CompressedWeight(_PackedWeight):
    """Signed codes packed along the columns, zero points along the rows, both with half their range added."""

    required = ("weight_packed", "weight_scale")
    optional = ("weight_shape", "weight_zero_point", "weight_g_idx")
    index = "weight_g_idx"

    def check(self) -> None:
        rows, columns = self.shape
        self.expect("weight_packed", ("I32",), (rows, -(-columns // self.per_word)))
        self.expect("weight_scale", _FLOATS, (rows, self.num_groups), *([(1,)] if self.num_groups == 1 else []))
        if "weight_zero_point" in self.parts:
            self.expect("weight_zero_point", ("I32",), (-(-rows // self.per_word), self.num_groups))
        if self.index in self.parts:
            self.expect(self.index, ("I32",), (columns,))
        if "weight_shape" in self.parts:
            self.expect("weight_shape", ("I64", "I32"), (2,))
            if (found := tuple(self.parts["weight_shape"].read().tolist())) != self.shape:
                raise ConfigError(
                    f"{self.file}: {self.module}.weight_shape is {list(found)}, must be {[rows, columns]}"
                )

    def codes(self, first: int, last: int) -> Array:
        codes = unpack(self.parts["weight_packed"].read()[first:last], self.quantization.bits)[:, : self.shape[1]]
        return codes.astype(np.int16) + np.int16(self.lowest)

    @property
    def lowest(self) -> int:
        return -(1 << self.quantization.bits - 1)

    def scales(self) -> Floats:
        return np.broadcast_to(self.floats("weight_scale"), (self.shape[0], self.num_groups))

    def zero_points(self) -> Floats | None:
        if "weight_zero_point" not in self.parts:
            return None
        zeros = unpack(self.parts["weight_zero_point"].read().T, self.quantization.bits)[:, : self.shape[0]].T
        return zeros.astype(np.float32) + self.lowest


class GgufWeight(QuantizedWeight):
    """Rows of blocks in one of ggml's types, whose meaning is what the package `gguf` has of it."""

    required = ("weight",)

    def check(self) -> None:
        self.expect("weight", BLOCK_TYPES, self.shape)

    def decode(self) -> Floats:
        quants = _gguf_quants()
        kind = quants.GGMLQuantizationType[self.parts["weight"].info.dtype]
        blocks, (rows, columns) = self.parts["weight"].read(), self.shape
        result = np.empty((rows, columns), np.float32)
        step = max(1, CHUNK_ELEMENTS // columns)
        with np.errstate(invalid="ignore", over="ignore"):  # of scales that are no numbers, which is found below
            for first in range(0, rows, step):
                result[first : first + step] = quants.dequantize(blocks[first : first + step], kind)
        if not np.isfinite(result).all():
            raise self._not_finite()
        return result

    def integer_format(self) -> IntegerFormat:
        """See `QuantizedWeight`."""
        kind = self.parts["weight"].info.dtype
        if kind not in gguf_blocks.FORMATS:
            raise self.not_kept(f"is of type {kind}")
        return gguf_blocks.FORMATS[kind]

    def integer_rows(self) -> Iterator[Integers]:
        """See `QuantizedWeight`."""
        blocks, (rows, columns) = self.parts["weight"].read(), self.shape
        step = max(1, CHUNK_ELEMENTS // columns)
        for first in range(0, rows, step):
            with np.errstate(invalid="ignore", over="ignore"):
                found = gguf_blocks.read_rows(blocks[first : first + step], self.parts["weight"].info.dtype)
            if not all(np.isfinite(part).all() for part in (found.scale, found.offset) if part is not None):
                raise self._not_finite()
            yield found

    def _not_finite(self) -> ConfigError:
        return ConfigError(f"{self.file}: {shown(self.module)} holds what is no finite number; download it again")


def _gguf_quants() -> Any:
    try:
        return importlib.import_module("gguf.quants")
    except ImportError:
        raise ConfigError("a GGUF file needs the package gguf; install it with: pip install 'qwenrt[export]'") from None


def unpack(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """Unsigned codes of int32 words [n, m], [n, m * 32 / bits]: the lowest bits are the first code."""
    bytes_ = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return bytes_
    codes = np.empty((words.shape[0], 2 * bytes_.shape[1]), np.uint8)
    codes[:, 0::2] = bytes_ & 15
    codes[:, 1::2] = bytes_ >> 4
    return codes


def _in_awq_order(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes [n, m] as they lie in their words, put in the order of the rows that they belong to."""
    result = np.empty_like(codes)
    for place, row in enumerate(_AWQ_ORDER):
        result[:, row::8] = codes[:, place::8]
    return result


LAYOUTS: dict[str, tuple[type[QuantizedWeight], ...]] = {
    "fp8": (ScaledWeight,),
    "awq": (AwqWeight,),
    "gptq": (GptqWeight,),
    "compressed-tensors": (CompressedWeight, ScaledWeight),
    "gguf": (GgufWeight,),
}
"""Per method of quantization_config, the layouts that its matrices may have."""


ACTIVATION_PARTS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale")
"""What says how activations and the KV cache were to be rounded; here they are not."""


def find_layout(parts: Mapping[str, Part], quantization: Quantization) -> type[QuantizedWeight] | None:
    """The layout that a module's tensors are in, by what follows its name in theirs; None for a plain matrix."""
    for layout in LAYOUTS[quantization.method]:
        marker = parts.get(layout.required[0])
        if marker and marker.info.dtype not in DTYPES:
            return layout
    return None
