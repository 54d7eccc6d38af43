"""The index inputs of a step on their way to the device: one page-locked buffer, one copy, addresses that never change."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...model_runner import IndexArray, StepInputs
from .device import ALIGNMENT, Device, give_back


class StepSizes(NamedTuple):
    """The dimensions of a step as TensorRT sees them, padding included."""

    num_tokens: int
    num_seqs: int
    num_logits: int
    max_blocks: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each index input."""
        return {
            "input_ids": (self.num_tokens,),
            "positions": (self.num_tokens,),
            "seq_lens": (self.num_seqs,),
            "query_start": (self.num_seqs + 1,),
            "logits_indices": (self.num_logits,),
            # Last: its used part is often much smaller than its room, and what lies behind it is not copied.
            "block_tables": (self.num_seqs, self.max_blocks),
        }


def padding_only() -> StepInputs:
    """A step without sequences: padded to any size it reads nothing from the KV pool and writes nothing to it."""
    none = np.empty(0, np.int32)
    return StepInputs(
        input_ids=none,
        positions=none,
        block_tables=none.reshape(0, 0),
        seq_lens=none,
        query_start=np.zeros(1, np.int32),
        logits_indices=none,
    )


class StepBuffers:
    """Room for steps of at most `largest`; the buffers are given back by `resources`."""

    def __init__(self, device: Device, largest: StepSizes, resources: ExitStack) -> None:
        self._device = device
        offsets, size = {}, 0
        for name, shape in largest.shapes.items():
            offsets[name] = size
            size += -(-math.prod(shape) * 4 // ALIGNMENT) * ALIGNMENT
        self._host = device.allocate_pinned(size)
        give_back(resources, device.free_pinned, self._host)
        self._address = device.allocate(size)
        give_back(resources, device.free, self._address)
        self.addresses = {name: self._address + offset for name, offset in offsets.items()}
        """Where each input lies on the device."""
        self._places: dict[str, npt.NDArray[np.int32]] = {
            name: self._host[offset : offset + math.prod(largest.shapes[name]) * 4].view(np.int32)
            for name, offset in offsets.items()
        }
        self._tables_offset = offsets["block_tables"]

    def upload(self, inputs: StepInputs, sizes: StepSizes, stream: int) -> None:
        """Queue the copy of a step, padded to `sizes`.

        Rows, sequences and logits past those of `inputs` are padding: they lie past the last `query_start`, so attention neither
        reads nor writes for them, and what logits they give is not looked at.
        """
        self._put("input_ids", inputs.input_ids, sizes.num_tokens, 0)
        self._put("positions", inputs.positions, sizes.num_tokens, 0)
        self._put("seq_lens", inputs.seq_lens, sizes.num_seqs, 0)
        self._put("query_start", inputs.query_start, sizes.num_seqs + 1, int(inputs.query_start[-1]))
        self._put("logits_indices", inputs.logits_indices, sizes.num_logits, 0)
        num_seqs, width = inputs.block_tables.shape
        used = sizes.num_seqs * sizes.max_blocks
        tables = self._places["block_tables"][:used].reshape(sizes.num_seqs, sizes.max_blocks)
        tables[:num_seqs, :width] = inputs.block_tables
        tables[:num_seqs, width:] = -1
        tables[num_seqs:] = -1
        self._device.upload(self._address, self._host[: self._tables_offset + 4 * used], stream)

    def _put(self, name: str, values: IndexArray, size: int, padding: int) -> None:
        place = self._places[name]
        place[: len(values)] = values
        place[len(values) : size] = padding
