"""From a step plan to the arrays that the graph takes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .engine_dir import Limits
from .request import StepPlan

IndexArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The graph's index inputs for T tokens of S sequences, of which R rows' logits are wanted; all int32 and contiguous."""

    input_ids: IndexArray
    """[T] token ids, the sequences back to back."""
    positions: IndexArray
    """[T] absolute position of each token."""
    block_tables: IndexArray
    """[S, max_blocks] blocks of each sequence; -1 where it has fewer."""
    seq_lens: IndexArray
    """[S] context length after the step."""
    query_start: IndexArray
    """[S + 1] first row of each sequence, and T."""
    logits_indices: IndexArray
    """[R] rows to sample from."""
    lora_indices: IndexArray | None = None
    """[T] slot of each token's adapter, -1 for none; None of a step without adapters."""


class ModelRunner:
    """Fills one set of preallocated buffers; the arrays it returns are views that the next step overwrites."""

    def __init__(self, limits: Limits, block_size: int) -> None:
        tokens, sequences = limits.max_num_batched_tokens, limits.max_num_seqs
        self._input_ids = np.zeros(tokens, np.int32)
        self._positions = np.zeros(tokens, np.int32)
        self._all_positions = np.arange(limits.max_model_len, dtype=np.int32)
        self._block_tables = np.zeros(sequences * -(-limits.max_model_len // block_size), np.int32)
        self._seq_lens = np.zeros(sequences, np.int32)
        self._query_start = np.zeros(sequences + 1, np.int32)
        self._logits_indices = np.zeros(tokens, np.int32)
        self._lora_indices = np.zeros(tokens, np.int32)

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Arrays for the chunks of `plan`, in its order."""
        num_seqs = len(plan.chunks)
        width = max(len(chunk.request.block_ids) for chunk in plan.chunks)
        tables = array("i")
        # A read of a padded entry is an error, not somebody else's block.
        padding = array("i", [-1]) * width
        input_ids: list[int] = []
        seq_lens: list[int] = []
        rows: list[int] = []
        wanted: list[int] = []
        row = 0
        slots: list[int] = []
        for chunk in plan.chunks:
            request, start, count, samples, drafts = chunk
            if count == 1:
                input_ids.append(request.token_ids[start])
            else:
                input_ids += request.token_ids[start : start + count - len(drafts)]
                input_ids += drafts
                self._positions[row : row + count] = self._all_positions[start : start + count]
            tables += request.block_ids
            tables += padding[len(request.block_ids) :]
            slots.append(request.adapter_slot)
            seq_lens.append(start + count)
            row += count
            rows.append(row)
            if count == 1 and samples:
                wanted.append(row - 1)
            else:
                wanted += range(row - chunk.num_logits, row)
        ends = self._query_start[1 : num_seqs + 1]
        ends[:] = rows
        self._seq_lens[:num_seqs] = seq_lens
        # Of one token or the last of several: the position before the length.
        self._positions[ends - 1] = self._seq_lens[:num_seqs] - 1
        self._block_tables[: len(tables)] = tables
        self._input_ids[:row] = input_ids
        self._logits_indices[: len(wanted)] = wanted
        num_logits = len(wanted)
        adapted = max(slots) >= 0
        if adapted:
            self._lora_indices[:row] = np.repeat(slots, [chunk.count for chunk in plan.chunks])
        return StepInputs(
            input_ids=self._input_ids[:row],
            positions=self._positions[:row],
            block_tables=self._block_tables[: len(tables)].reshape(num_seqs, width),
            seq_lens=self._seq_lens[:num_seqs],
            query_start=self._query_start[: num_seqs + 1],
            logits_indices=self._logits_indices[:num_logits],
            lora_indices=self._lora_indices[:row] if adapted else None,
        )
