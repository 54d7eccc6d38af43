"""From a step plan to the arrays that the graph takes."""

from __future__ import annotations

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

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Arrays for the chunks of `plan`, in its order."""
        num_seqs = len(plan.chunks)
        width = max(len(chunk.request.block_ids) for chunk in plan.chunks)
        block_tables = self._block_tables[: num_seqs * width].reshape(num_seqs, width)
        row = num_logits = 0
        for index, chunk in enumerate(plan.chunks):
            request, start, stop = chunk.request, chunk.start, chunk.start + chunk.count
            own = chunk.count - len(chunk.drafts)
            self._input_ids[row : row + own] = request.token_ids[start : start + own]
            self._input_ids[row + own : row + chunk.count] = chunk.drafts
            self._positions[row : row + chunk.count] = self._all_positions[start:stop]
            num_blocks = len(request.block_ids)
            block_tables[index, :num_blocks] = np.frombuffer(request.block_ids, np.int32)
            # A read of a padded entry is an error, not somebody else's block.
            block_tables[index, num_blocks:] = -1
            self._seq_lens[index] = stop
            row += chunk.count
            self._query_start[index + 1] = row
            wanted = chunk.num_logits
            self._logits_indices[num_logits : num_logits + wanted] = np.arange(row - wanted, row)
            num_logits += wanted
        return StepInputs(
            input_ids=self._input_ids[:row],
            positions=self._positions[:row],
            block_tables=block_tables,
            seq_lens=self._seq_lens[:num_seqs],
            query_start=self._query_start[: num_seqs + 1],
            logits_indices=self._logits_indices[:num_logits],
        )
