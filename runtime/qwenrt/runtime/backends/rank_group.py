"""The ranks of a tensor-parallel engine, as torch.distributed connects them: over gloo on the CPU, over NCCL on GPUs."""

from __future__ import annotations

import datetime
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed
"""Its stubs leave out most of what is used here."""

_MEETING = datetime.timedelta(seconds=60)
"""How long a rank waits for the others to be there: all have started when the first one begins to."""
_TIMEOUT = datetime.timedelta(seconds=300)
"""How long it then waits for them in a step: they are a step's work apart at most."""

Tensor = torch.Tensor


class RankGroup:
    """A process group of its own, so that a program may have several, and one of PyTorch's for itself."""

    def __init__(self, folder: Path, rank: int, size: int, device: torch.device) -> None:
        """Meet the other ranks at a file in `folder`; returns when all are there."""
        store = dist.FileStore(str(folder / "ranks"), size)
        store.set_timeout(_MEETING)
        self.size = size
        self._device = device
        self._group = _nccl(store, rank, size) if device.type == "cuda" else _gloo(store, rank, size)

    def all_reduce(self, x: Tensor, *, group_size: int) -> Tensor:
        """AllReduce of the schema: the sum of all ranks' x, each rank's to the same bit.

        On the CPU it is added up in the order of the ranks, so that a row's bits do not depend on others: gloo's own allreduce
        divides a tensor up among the ranks, and takes two to three times as long for the few rows of a step that decodes.
        """
        assert group_size == self.size
        if self._device.type == "cpu":
            first, *others = self._gather_rows(x).chunk(self.size)
            return functools.reduce(torch.add, others, first)
        y = x.clone(memory_format=torch.contiguous_format)
        self._group.allreduce([y]).wait()
        return y

    def all_gather(self, x: Tensor, *, group_size: int) -> Tensor:
        """AllGather of the schema: [R, width] of each rank to [R, group_size * width]."""
        assert group_size == self.size
        rows, width = x.shape
        return self._gather_rows(x).view(self.size, rows, width).transpose(0, 1).reshape(rows, -1)

    def dist_collective(self, x: Tensor, *, collective_operation: bytes, nb_rank: int, **rest: Any) -> Tensor:
        """DistCollective of the schema, as graphs for TensorRT have it."""
        if collective_operation == b"all_reduce":
            return self.all_reduce(x, group_size=nb_rank)
        assert collective_operation == b"all_gather" and nb_rank == self.size
        return self._gather_rows(x)

    def _gather_rows(self, x: Tensor) -> Tensor:
        """[R, width] of each rank, one below the other."""
        y = x.new_empty(self.size * x.shape[0], x.shape[1])
        self._group._allgather_base(y, x.contiguous()).wait()
        return y

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        values = torch.tensor([value], device=self._device)
        self._group.allreduce([values], options).wait()
        return int(values)

    def abort(self) -> None:
        """Let calls that wait for a rank that is gone fail; gloo's do by themselves."""
        if self._device.type == "cuda":
            self._group.abort()


def _gloo(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    # By default gloo listens where the machine's name points to, which others can reach.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _MEETING
    group = dist.ProcessGroupGloo(store, rank, size, options)
    group.set_timeout(_TIMEOUT)
    return group


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)
