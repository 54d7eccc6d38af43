"""Weight formats of 8 and 4 bits that our Linear takes on the CPU: a matrix becomes panels, a scale a row, and groups.

int8 and int4 are made here of any matrix; `checkpoint` keeps the integers, scales and zero points that a quantised one has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from qwenrt.plugins import panels

from ..checkpoint import Checkpoint
from ..integers import ROW_GROUP, IntegerFormat
from ..quantize import Int4Weight, Int8Weight, QuantizedWeight
from ..weights import Array, Floats

GROUP_SIZES = {"int4": 32, "int4-g64": 64, "int4-g128": 128}
"""Columns of a group, by 4-bit format."""
CHECKPOINT = "checkpoint"
FORMATS = ("int8", *GROUP_SIZES, CHECKPOINT)


@dataclasses.dataclass
class Panels:
    """How a matrix [width, depth] is stored: the initializers' names, types and shapes, and the values of some of its rows."""

    name: str
    width: int
    depth: int
    group_size: int | None
    """Columns of a 4-bit group; None: int8."""
    measured: bool = False
    """Whether `lost` and `size` are counted."""
    lost: float = 0.0
    """Sum of squares of what was encoded so far, less what it became."""
    size: float = 0.0
    """Sum of squares of what was encoded so far."""

    @property
    def names(self) -> tuple[str, ...]:
        """The initializers in the order in which Linear takes them: panels, scale, and groups if there are any."""
        return (self.name, f"{self.name}_scale", f"{self.name}_groups")[: 2 if self.group_size is None else 3]

    def initializers(self) -> list[ir.Value]:
        """Initializers without values."""
        codes = ir.DataType.INT8 if self.group_size is None else ir.DataType.UINT8
        empty = self.encode(np.zeros((0, self.depth), np.float32))
        count = panels.num_panels(self.width)
        shapes = [(count, *empty[0].shape[1:]), (self.width,), *((count, *part.shape[1:]) for part in empty[2:])]
        types = (codes, ir.DataType.FLOAT, ir.DataType.UINT8)
        return [
            ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(type_))
            for name, shape, type_ in zip(self.names, shapes, types, strict=False)
        ]

    def encode(self, rows: Floats, scales: Floats | None = None) -> tuple[Array, ...]:
        """Some rows [n, depth], whole panels unless they are the last."""
        known = None if scales is None or np.isnan(scales).all() else scales
        if self.group_size is None:
            whole = Int8Weight.encode(rows, known)
            self._count(rows, whole)
            return panels.pack_int8(whole.codes), whole.scale
        half = Int4Weight.encode(rows, known, group_size=self.group_size)
        self._count(rows, half)
        groups = panels.pack_groups(half.multiplier, half.zero_point, self.depth, self.group_size)
        return panels.pack_int4(half.codes, self.group_size), half.scale, groups

    def _count(self, rows: Floats, stored: QuantizedWeight) -> None:
        if not self.measured:
            return
        self.lost += float(np.square(stored.decode() - rows, dtype=np.float64).sum())
        self.size += float(np.square(rows, dtype=np.float64).sum())


@dataclasses.dataclass(frozen=True)
class KeptPanels:
    """A matrix [width, depth] of the checkpoint's own integers, in the form that holds those of all its sources."""

    name: str
    width: int
    depth: int
    form: IntegerFormat
    sources: tuple[str, ...]
    """Quantised matrices of the checkpoint, one below the other."""

    @property
    def names(self) -> tuple[str, ...]:
        """The initializers, named for what Linear calls them."""
        present = {
            "": True,
            "_scale": True,
            "_groups": self.form.bits == 4,
            "_group_scale": self.form.group_size > 0,
            "_group_offset": self.form.offset,
        }
        return tuple(self.name + suffix for suffix, is_there in present.items() if is_there)

    def initializers(self) -> list[ir.Value]:
        """Initializers without values."""
        codes = np.uint8 if self.form.bits == 4 else np.int8
        groups = -(-self.depth // self._group_size)
        parts: list[Array] = [np.zeros((0, self.depth), codes), np.zeros(0, np.float32)]
        parts += [
            np.zeros((0, groups), np.uint8 if name.endswith("_groups") else np.float32) for name in self.names[2:]
        ]
        count = panels.num_panels(self.width)
        return [
            ir.Value(
                name=name,
                shape=ir.Shape((self.width,) if part.ndim == 1 else (count, *part.shape[1:])),
                type=ir.TensorType(ir.DataType.from_numpy(part.dtype)),
            )
            for name, part in zip(self.names, self._packed(parts), strict=True)
        ]

    def blocks(self, checkpoint: Checkpoint) -> Iterator[tuple[Array, ...]]:
        """The values of some rows of each initializer, from the first to the last."""
        waiting: list[Array] = []
        for source in self.sources:
            for rows in checkpoint.quantized[source].integer_rows():
                parts = rows.arranged(self.form)
                waiting = (
                    [np.concatenate(pair) for pair in zip(waiting, parts, strict=True)] if waiting else list(parts)
                )
                if whole := len(waiting[0]) // panels.PANEL_WIDTH * panels.PANEL_WIDTH:
                    yield self._packed([part[:whole] for part in waiting])
                    waiting = [part[whole:] for part in waiting]
            checkpoint.forget(source)
        if len(waiting[0]):
            yield self._packed(waiting)

    @property
    def _group_size(self) -> int:
        return self.form.group_size or ROW_GROUP

    def _packed(self, parts: list[Array]) -> tuple[Array, ...]:
        codes, scale, *groups = parts
        size = self._group_size if groups else 1
        packed = panels.pack_int4(codes, size) if self.form.bits == 4 else panels.pack_int8(codes, size)
        if self.form.bits == 4:
            groups[0] = groups[0] << 4 | 1
        return packed, scale, *(panels.pack_group_values(part, self.depth, size) for part in groups)


_FLOAT_TYPES = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}
Kept: TypeAlias = KeptPanels | ir.DataType
"""How a matrix of a quantised checkpoint is kept: its integers, or floats of this type."""


def kept_formats(
    sources: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, int]], checkpoint: Checkpoint
) -> dict[str, Kept]:
    """How to keep each matrix of `shapes`, which is made of its `sources` in the checkpoint.

    Where some of its sources are integers and others are floats, or of several float types, all become float32, which loses
    nothing either. Raises ConfigError naming a matrix whose integers no format holds.
    """
    return {name: _kept_format(name, shape, sources[name], checkpoint) for name, shape in shapes.items()}


def _kept_format(name: str, shape: tuple[int, int], sources: tuple[str, ...], checkpoint: Checkpoint) -> Kept:
    if all(source in checkpoint.quantized for source in sources):
        form = reduce(IntegerFormat.joined, [checkpoint.quantized[source].integer_format() for source in sources])
        return KeptPanels(name, *shape, form, sources)
    types = {None if source in checkpoint.quantized else checkpoint.tensors[source].dtype for source in sources}
    only = types.pop() if len(types) == 1 else None
    return ir.DataType.FLOAT if only is None else _FLOAT_TYPES[only]


def loss(encodings: Collection[Panels]) -> str:
    """How far the matrices are from what they were: the relative error of all and the largest of one, in Frobenius norms."""
    errors = {one.name: math.sqrt(one.lost / one.size) if one.size else 0.0 for one in encodings}
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst]:
        return "exactly"
    whole = math.sqrt(sum(one.lost for one in encodings) / sum(one.size for one in encodings))
    return f"with a relative error of {whole:.2%} ({worst}: {errors[worst]:.2%})"
