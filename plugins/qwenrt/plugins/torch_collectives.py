"""AllReduce and AllGather for PyTorch's tracer: importing this registers torch.ops.qwenrt.all_reduce and all_gather.

They have shapes and no kernels: who runs a graph of theirs has a process group, which a torch op cannot be given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .schema import ALL_GATHER, ALL_REDUCE


def _all_reduce(x: Tensor, group_size: int) -> Tensor:
    return torch.empty_like(x)


def _all_gather(x: Tensor, group_size: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], group_size * x.shape[-1])


for _name, _spec, _shape in (("all_reduce", ALL_REDUCE, _all_reduce), ("all_gather", ALL_GATHER, _all_gather)):
    torch.library.define(f"qwenrt::{_name}", _spec.torch_schema)
    torch.library.register_fake(f"qwenrt::{_name}", _shape)
