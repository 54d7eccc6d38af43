"""The Muon optimizer in float32, batched over matrices of one shape.

torch.optim.Muon orthogonalizes in bfloat16, which CPUs without bfloat16 arithmetic emulate about
fifty times slower than float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring the singular values of `matrices` [count, rows, columns] close to one."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x: Tensor = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    # The Gram matrix is smallest on the side with fewer rows.
    tall = x.size(1) > x.size(2)
    if tall:
        x = x.mT
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if tall:
        x = x.mT
    return x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is orthogonalized; for matrices only."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix from its gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                updates = orthogonalize(torch.stack([self._momentum(m, group["momentum"]) for m in matrices]))
                # Keeps the root mean square of the update independent of the aspect ratio.
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, matrix: Tensor, momentum: float) -> Tensor:
        """Fold the gradient into the running mean; returns the Nesterov look-ahead."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["mean"] = torch.zeros_like(matrix)
        mean: Tensor = state["mean"]
        mean.lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(mean, momentum)
