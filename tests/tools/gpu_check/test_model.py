"""What the kernels must move and compute, counted from the tensors of a call."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_check.cases import BFLOAT16, FLOAT8, make_call
from gpu_check.experts import make_experts_call
from gpu_check.model import Experts, Heads, decode_bytes, experts_bytes, experts_flops, prefill_flops, rope_bytes

HEADS = Heads(num_heads=8, num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize("kv_dtype", [BFLOAT16, FLOAT8], ids=str)
def test_bytes_are_those_of_the_tensors(kv_dtype: np.dtype) -> None:
    call = make_call(
        [(1, 32)] * 3, dtype=BFLOAT16, kv_dtype=kv_dtype, num_heads=8, num_kv_heads=2, head_dim=64, block_size=32
    )
    tensors = call.tensors
    block = tensors["kv_cache"][0].nbytes  # one block holds one context here: K and V of all heads
    attn = 3 * 8 * 64 * 2
    assert decode_bytes(HEADS, 3, 32, kv_dtype.itemsize) == 3 * block + 2 * attn
    written = 3 * block // 32
    angles = 3 * tensors["rope"][0].nbytes
    assert rope_bytes(HEADS, 3, kv_dtype.itemsize) == tensors["qkv"].nbytes + angles + attn + written


def test_decode_of_the_target_moves_what_the_readme_says() -> None:
    assert decode_bytes(Heads(), 64, 4096, 2) == pytest.approx(1.07e9, rel=0.01)


def test_flops_are_two_products_over_what_each_row_sees() -> None:
    seen = np.tri(7).sum()
    assert prefill_flops(HEADS, 7) == 2 * (2 * 8 * 64) * seen


def test_experts_move_their_tensors_and_compute_three_products_a_row() -> None:
    experts = Experts(num_experts=8, top_k=2, hidden=64, inner=24)
    call = make_experts_call(5, 8, 2, 64, 24, dtype=BFLOAT16)
    x, matrices = call.tensors["x"], call.tensors["gate_up"].nbytes + call.tensors["down"].nbytes
    assert experts_bytes(experts, 5, 8) == 2 * x.nbytes + call.tensors["router_logits"].nbytes + matrices
    assert experts_bytes(experts, 5, 3) == experts_bytes(experts, 5, 8) - matrices * 5 // 8
    assert experts_flops(experts, 5) == 5 * 2 * 2 * (call.tensors["gate_up"].size + call.tensors["down"].size) // 8
