"""What a decoder that is split over ranks has in place of single projections; see `tensor_parallel`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwenrt.plugins import torch_collectives  # noqa: F401  (it registers torch.ops.qwenrt.all_reduce and all_gather)

from .config import ModelConfig
from .tensor_parallel import TensorParallel


class AllReduce(nn.Module):
    """The sum of all ranks' tensors."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.size = tp.size

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] to [T, width]."""
        y: Tensor = torch.ops.qwenrt.all_reduce(x, self.size)
        return y


class AllGather(nn.Module):
    """All ranks' columns, in the order of the ranks."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.size = tp.size

    def forward(self, x: Tensor) -> Tensor:
        """[R, width] to [R, ranks * width]."""
        y: Tensor = torch.ops.qwenrt.all_gather(x, self.size)
        return y


class RowParallelLinear(nn.Linear):
    """A product whose columns are split over the ranks: theirs are summed, and then a bias is added."""

    def __init__(self, in_features: int, out_features: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.all_reduce = AllReduce(tp)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] of this rank to [T, out_features] of all."""
        y: Tensor = self.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class VocabParallelHead(nn.Linear):
    """A head whose rows are split over the ranks: each has the logits of its words, and they are put side by side."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config.hidden_size, config.vocab_size // tp.size, bias=False)
        self.all_gather = AllGather(tp)

    def forward(self, x: Tensor) -> Tensor:
        """[R, hidden] to [R, vocab]."""
        y: Tensor = self.all_gather(super().forward(x))
        return y


class SharedKVProjection(nn.Module):
    """q of this rank beside k and v that it shares with other ranks, so that these lie in the weight file once."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.q_proj = nn.Linear(config.hidden_size, config.q_size, bias=config.attention_bias)
        self.kv_proj = nn.Linear(config.hidden_size, 2 * config.kv_size, bias=config.attention_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to the packed projection [T, q_size + 2 * kv_size]."""
        return torch.cat((self.q_proj(x), self.kv_proj(x)), dim=-1)


def summed_linear(in_features: int, out_features: int, bias: bool, tp: TensorParallel) -> nn.Linear:
    """The product after heads or inner values, of which a rank has its own."""
    if tp.size == 1:
        return nn.Linear(in_features, out_features, bias=bias)
    return RowParallelLinear(in_features, out_features, bias, tp)
