"""MixtureOfExperts in PyTorch: importing this registers torch.ops.qwenrt.mixture_of_experts.

In one 16-bit type on CUDA it is our kernels, as far as they have the sizes; else PyTorch's own operations, on any device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import torch_cuda
from .errors import ConfigError
from .schema import MIXTURE_OF_EXPERTS


def _mixture_of_experts(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    gate_up_groups: Tensor | None,
    down_groups: Tensor | None,
    gate_up_group_scale: Tensor | None,
    down_group_scale: Tensor | None,
    gate_up_group_offset: Tensor | None,
    down_group_offset: Tensor | None,
    top_k: int,
    norm_topk_prob: int,
) -> Tensor:
    if gate_up_scale is not None or down_scale is not None:
        raise ConfigError("experts of integers are not computed in PyTorch; use backend onnxruntime")
    if x.is_cuda:
        whole, logits = x.contiguous(), router_logits.contiguous()
        with torch.cuda.device(x.device):
            stream = torch.cuda.current_stream(x.device).cuda_stream
            y = _by_kernels(whole, logits, gate_up.contiguous(), down.contiguous(), top_k, norm_topk_prob, stream)
        if y is not None:
            return y
    return _by_pytorch(x, router_logits, gate_up, down, top_k, norm_topk_prob)


def _by_kernels(
    x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, norm_topk_prob: int, stream: int
) -> Tensor | None:
    """None if the kernels have not these types or sizes."""
    shape = torch_cuda.experts_shape(x, router_logits, gate_up, down, top_k, norm_topk_prob)
    if shape is None or torch_cuda.kernels().unsupported(shape):
        return None
    return torch_cuda.launch_experts(torch_cuda.kernels(), shape, x, router_logits, gate_up, down, stream)


def _by_pytorch(
    x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, norm_topk_prob: int
) -> Tensor:
    """In float32 whatever the types are, one expert after the other."""
    dtype, x, router_logits = x.dtype, x.float(), router_logits.float()
    num_experts = router_logits.shape[1]
    # A stable sort, where topk may give equal logits in any order.
    order = router_logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    scores = router_logits.softmax(-1).gather(1, order)
    if norm_topk_prob:
        scores = scores / scores.sum(-1, keepdim=True)
    gate_ups, downs = gate_up.view(num_experts, -1, x.shape[1]), down.view(num_experts, x.shape[1], -1)
    y = torch.zeros_like(x)
    for expert in sorted(set(order.flatten().tolist())):
        tokens, slots = torch.where(order == expert)
        gate, up = F.linear(x[tokens], gate_ups[expert].float()).chunk(2, dim=-1)
        inner = F.linear(F.silu(gate) * up, downs[expert].float())
        y.index_add_(0, tokens, scores[tokens, slots, None] * inner)
    return y.to(dtype)


def _output_shape(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x)


mixture_of_experts = torch.library.custom_op(
    "qwenrt::mixture_of_experts", _mixture_of_experts, mutates_args=(), schema=MIXTURE_OF_EXPERTS.torch_schema
)
"""As `schema.MIXTURE_OF_EXPERTS` has it; matrices of any float type."""
mixture_of_experts.register_fake(_output_shape)
