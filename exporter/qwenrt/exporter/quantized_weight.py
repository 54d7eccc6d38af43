"""Matrices that are stored as integers with scales: decoded to float32, or given as they are.

But for GGUF's, a weight is (code - zero point) * scale, one product rounded once.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

from .integers import GROUP_SIZES, IntegerFormat, Integers
from .json_fields import shown
from .quantization_config import Quantization
from .safetensors_file import TensorInfo, widened

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
CHUNK_ELEMENTS = 1 << 22
"""Of a matrix, decoded at a time."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the tensors that a quantised matrix is stored in."""

    info: TensorInfo
    read: Callable[[], Array]


class QuantizedWeight(abc.ABC):
    """A matrix [rows, columns] in parts, which are named by what follows the module's name; the first has the codes.

    Raises ConfigError at construction if a part is missing, or has a type or a shape that does not fit.
    """

    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, module: str, parts: Mapping[str, Part], shape: tuple[int, int], quantization: Quantization
    ) -> None:
        self.module = module
        self.parts = parts
        self.shape = shape
        self.quantization = quantization
        for name in self.required:
            if name not in parts:
                some = next(iter(parts.values())).info.file
                raise ConfigError(
                    f"{some}: {shown(module)} has {', '.join(sorted(parts))} and no {name}, which {quantization.method} "
                    "needs; download the checkpoint again"
                )
        self.check()

    @abc.abstractmethod
    def check(self) -> None:
        """Raise ConfigError unless types and shapes of the parts fit."""

    @abc.abstractmethod
    def decode(self) -> Floats:
        """The matrix in float32. Raises ConfigError if a scale or a code is no finite number."""

    @abc.abstractmethod
    def integer_format(self) -> IntegerFormat:
        """What its integers need to be kept as they are. Raises ConfigError where no format holds them."""

    @abc.abstractmethod
    def integer_rows(self) -> Iterator[Integers]:
        """All rows from the first to the last, a few at a time, where there is an `integer_format`."""

    def not_kept(self, why: str) -> ConfigError:
        """For a matrix without an `integer_format`."""
        return ConfigError(
            f"{self.file}: {shown(self.module)} {why}, which weights checkpoint cannot keep; use weights int8 or float32"
        )

    @property
    def file(self) -> str:
        """Where the codes are, for messages."""
        return str(self.parts[self.required[0]].info.file)

    def expect(self, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raise ConfigError unless a part has one of these types and shapes."""
        info = self.parts[name].info
        if info.dtype not in dtypes:
            raise ConfigError(f"{info.file}: {self.module}.{name} is {info.dtype}, must be {' or '.join(dtypes)}")
        if info.shape not in shapes:
            rows, columns = self.shape
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ConfigError(
                f"{info.file}: {self.module}.{name} has shape {list(info.shape)}, must be {wanted} for a weight "
                f"[{rows}, {columns}] of {self.quantization}"
            )

    def row_scales(self) -> Floats | None:
        """[rows], where each row is integers times one number; else None."""
        return None

    def floats(self, name: str) -> Floats:
        """A part in float32, whatever float type it is stored in."""
        return widened(self.parts[name].read())


class AffineWeight(QuantizedWeight):
    """Every element is (code - zero point) * scale."""

    unit: ClassVar[int] = 1
    """Rows are unpacked in multiples of this."""

    @abc.abstractmethod
    def codes(self, first: int, last: int) -> Array:
        """Codes of rows [first, last), numbers of any type."""

    @abc.abstractmethod
    def scales(self) -> Floats:
        """One for each block of rows and group of columns."""

    def zero_points(self) -> Floats | None:
        """What is subtracted from the codes, in the shape of the scales; None: nothing."""
        return None

    @property
    def rows_per_scale(self) -> int:
        """Rows in a block."""
        return 1

    @abc.abstractmethod
    def column_groups(self) -> Array:
        """For each column its group."""

    def row_scales(self) -> Floats | None:
        scales = self.scales()
        if scales.shape[1] != 1:
            return None
        one_each: Floats = scales[np.arange(self.shape[0]) // self.rows_per_scale, 0]
        return one_each

    def decode(self) -> Floats:
        """See `QuantizedWeight`."""
        scales, zeros, groups = self._finite_scales(), self.zero_points(), self.column_groups()
        result = np.empty(self.shape, np.float32)
        for first, last in self._row_chunks():
            values = result[first:last]
            values[:] = self.codes(first, last)
            if np.isnan(values).any():
                raise ConfigError(f"{self.file}: {shown(self.module)} holds a NaN; download the checkpoint again")
            blocks = np.arange(first, last) // self.rows_per_scale
            if zeros is not None:
                values -= zeros[blocks][:, groups]
            values *= scales[blocks][:, groups]
        return result

    def integer_format(self) -> IntegerFormat:
        """See `QuantizedWeight`."""
        groups, zeros, size = self.column_groups(), self.zero_points(), 0
        if groups.any():
            columns = int(np.count_nonzero(groups == 0))
            if columns == 0 or (groups != np.arange(len(groups)) // columns).any():
                raise self.not_kept("has columns in groups of any order (g_idx, act-order)")
            size = next((size for size in GROUP_SIZES if columns % size == 0), 0)
            if size == 0:
                raise self.not_kept(f"has groups of {columns} columns")
        bits, offset = self.bits, False
        if bits == 8 and zeros is not None:
            offset = bool((zeros != self.lowest + 128).any())
        return IntegerFormat(bits, size or (GROUP_SIZES[0] if offset else 0), offset)

    def integer_rows(self) -> Iterator[Integers]:
        """See `QuantizedWeight`."""
        form, scales, zeros = self.integer_format(), self._finite_scales(), self.zero_points()
        size = int(np.count_nonzero(self.column_groups() == 0))
        middle = self.lowest + 128
        offsets = None
        if form.offset and zeros is not None:
            offsets = (middle - zeros) * scales
            if (offsets != (middle - zeros).astype(np.float64) * scales).any():
                raise self.not_kept("has zero points and scales whose products float32 does not hold")
        for first, last in self._row_chunks():
            blocks = np.arange(first, last) // self.rows_per_scale
            codes = self.codes(first, last)
            if form.bits == 4:
                zero = np.zeros_like(scales[blocks]) if zeros is None else zeros[blocks]
                found = (codes - codes.dtype.type(self.lowest)).astype(np.uint8)
                yield Integers(found, size, scales[blocks], (zero - self.lowest).astype(np.uint8))
            else:
                centred = (codes.astype(np.int16) - np.int16(middle)).astype(np.int8)
                yield Integers(centred, size, scales[blocks], None, None if offsets is None else offsets[blocks])

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.quantization.bits

    @property
    def lowest(self) -> int:
        """The lowest code that there may be."""
        return 0

    def _finite_scales(self) -> Floats:
        scales = self.scales()
        if not np.isfinite(scales).all():
            raise ConfigError(
                f"{self.file}: a scale of {shown(self.module)} is no finite number; download the checkpoint again"
            )
        return scales

    def _row_chunks(self) -> Iterator[tuple[int, int]]:
        """First and last row of each chunk to work on."""
        rows, columns = self.shape
        step = max(1, CHUNK_ELEMENTS // (columns * self.unit)) * self.unit
        for first in range(0, rows, step):
            yield first, min(first + step, rows)
