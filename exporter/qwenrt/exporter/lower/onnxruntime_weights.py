"""Weight formats of 8 and 4 bits that our Linear takes on the CPU: a matrix becomes panels, a scale a row, and 4-bit groups."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from qwenrt.plugins import panels

from ..quantize import Int4Weight, Int8Weight, QuantizedWeight
from ..weights import Array, Floats

GROUP_SIZES = {"int4": 32, "int4-g64": 64, "int4-g128": 128}
"""Columns of a group, by 4-bit format."""
FORMATS = ("int8", *GROUP_SIZES)


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


def loss(encodings: Collection[Panels]) -> str:
    """How far the matrices are from what they were: the relative error of all and the largest of one, in Frobenius norms."""
    errors = {one.name: math.sqrt(one.lost / one.size) if one.size else 0.0 for one in encodings}
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst]:
        return "exactly"
    whole = math.sqrt(sum(one.lost for one in encodings) / sum(one.size for one in encodings))
    return f"with a relative error of {whole:.2%} ({worst}: {errors[worst]:.2%})"
