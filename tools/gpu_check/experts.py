"""Random calls of MixtureOfExperts, the part of the op suite that is made of them, and what they are held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwenrt.plugins.reference import mixture_of_experts

from .cases import BFLOAT16, FLOAT16, Call
from .memory import Array
from .op import CudaOp

# Of y, absolute and relative: inner values, each expert's output and y itself are each rounded to the type once.
TOLERANCE = {FLOAT16: 3e-3, BFLOAT16: 2e-2}


def make_experts_call(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    *,
    dtype: Any,
    norm: int = 1,
    used: int | None = None,
    seed: int = 0,
) -> Call:
    """Tokens over `experts` experts; with `used`, over the first so many alone, and NaN in the matrices of the others."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal((tokens, experts)).astype(np.float32)
    gate_up = random.standard_normal((experts, 2 * inner * hidden)).astype(np.float32) / np.float32(hidden**0.5)
    down = random.standard_normal((experts, hidden * inner)).astype(np.float32) / np.float32(inner**0.5)
    if used is not None:
        logits[:, used:] = -np.inf
        gate_up[used:] = down[used:] = np.nan
    tensors: dict[str, Array] = {
        "x": random.standard_normal((tokens, hidden)),
        "router_logits": logits,
        "gate_up": gate_up.reshape(-1, hidden),
        "down": down.reshape(-1, inner),
    }
    return Call(
        {name: tensor.astype(dtype) for name, tensor in tensors.items()}, {"top_k": top_k, "norm_topk_prob": norm}
    )


@dataclass(frozen=True)
class ExpertsCase:
    """A call of the op suite, made when it is wanted."""

    name: str
    sizes: tuple[int, int, int, int, int]
    options: Mapping[str, Any]

    def call(self) -> Call:
        """The same call every time."""
        return make_experts_call(*self.sizes, **self.options)

    def __str__(self) -> str:
        return self.name


def experts_suite() -> list[ExpertsCase]:
    """One row and many, one tile and several along each side, sizes that fill none of them, experts that nobody chooses."""
    cases: list[tuple[str, tuple[int, int, int, int, int], dict[str, Any]]] = [
        ("one token", (1, 8, 2, 64, 48), {}),
        ("one token, eight of 128", (1, 128, 8, 256, 64), {}),
        ("eight of 128", (70, 128, 8, 64, 48), {"norm": 0}),
        ("one of one", (3, 1, 1, 8, 8), {}),
        ("all of three", (5, 3, 3, 24, 16), {"norm": 0}),
        ("one of four", (40, 4, 1, 40, 72), {"norm": 0}),
        ("several tiles along each side", (150, 2, 2, 264, 200), {}),
        ("one full tile", (64, 4, 4, 64, 64), {}),
        ("three quarters of a tile", (40, 2, 2, 64, 64), {}),
        ("one row beyond a tile", (65, 2, 2, 136, 72), {}),
        ("experts without tokens", (33, 16, 2, 64, 64), {"used": 3}),
        ("all tokens to one expert", (130, 8, 1, 32, 32), {"used": 1}),
        ("no token", (0, 4, 2, 64, 64), {}),
        ("32 of 1024", (2, 1024, 32, 16, 8), {}),
        ("a number of experts that fills no warp", (20, 37, 5, 48, 24), {}),
    ]
    return [
        ExpertsCase(f"experts, {name}, {dtype}", sizes, {**options, "dtype": dtype})
        for name, sizes, options in cases
        for dtype in (FLOAT16, BFLOAT16)
    ]


def check_experts(op: CudaOp, call: Call) -> Array:
    """Runs the call and returns y; raises AssertionError where it differs from the reference by more than rounding."""
    y = op.mixture_of_experts(**call.arguments)
    expected = mixture_of_experts(**call.arguments)
    bound = TOLERANCE[y.dtype]
    np.testing.assert_allclose(y.astype(np.float32), expected, rtol=bound, atol=bound)
    return y
