"""Weight formats of 8 and 4 bits that our Linear takes on the CPU: a matrix becomes panels, a scale a row, and 4-bit groups."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qwenrt.plugins import panels

from ..quantize import Int4Weight, Int8Weight
from ..weights import Array

GROUP_SIZES = {"int4": 32, "int4-g64": 64, "int4-g128": 128}
"""Columns of a group, by 4-bit format."""
FORMATS = ("int8", *GROUP_SIZES)


@dataclasses.dataclass(frozen=True)
class Panels:
    """How a matrix [width, depth] is stored: the initializers' names, types and shapes, and the values of some of its rows."""

    name: str
    width: int
    depth: int
    group_size: int | None
    """Columns of a 4-bit group; None: int8."""

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

    def encode(self, rows: npt.NDArray[np.float32]) -> tuple[Array, ...]:
        """Some rows [n, depth], whole panels unless they are the last."""
        if self.group_size is None:
            whole = Int8Weight.encode(rows)
            return panels.pack_int8(whole.codes), whole.scale
        half = Int4Weight.encode(rows, group_size=self.group_size)
        groups = panels.pack_groups(half.multiplier, half.zero_point, self.depth, self.group_size)
        return panels.pack_int4(half.codes, self.group_size), half.scale, groups
