"""What a kernel must read, write and compute, from its sizes alone: the time that the hardware allows follows from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """The attention of a model; the default is that of Qwen3-8B."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def qkv_width(self) -> int:
        """Columns of qkv."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


ACTIVATION_BYTES = 2
"""Of an element of qkv and attn: float16 or bfloat16."""


def decode_bytes(heads: Heads, batch: int, context: int, kv_bytes: int) -> int:
    """Of device memory that decode attention of `batch` sequences of `context` tokens must move: K, V and q in, attn out.

    kv_bytes: of an element of the pool. What a kernel that splits K and V writes and reads beside that is its own affair.
    """
    kv = 2 * heads.num_kv_heads * context * heads.head_dim * kv_bytes
    return batch * (kv + 2 * heads.num_heads * heads.head_dim * ACTIVATION_BYTES)


def prefill_flops(heads: Heads, tokens: int) -> int:
    """Of causal attention of one prompt of `tokens`: two products of 2 * head_dim FLOP for each token that a row sees."""
    return 4 * heads.num_heads * heads.head_dim * (tokens * (tokens + 1) // 2)


def rope_bytes(heads: Heads, tokens: int, kv_bytes: int) -> int:
    """Of device memory that RMSNorm, RoPE and the cache write must move: qkv and float32 angles in, q, K and V out."""
    rotated = heads.num_heads * ACTIVATION_BYTES + 2 * heads.num_kv_heads * kv_bytes
    return tokens * (heads.qkv_width * ACTIVATION_BYTES + heads.head_dim * (rotated + 4))


@dataclass(frozen=True)
class Experts:
    """A mixture of experts; the default is a layer of Qwen3-30B-A3B."""

    num_experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    inner: int = 768


def experts_bytes(experts: Experts, tokens: int, used: float) -> int:
    """Of device memory that a mixture of experts must move: the matrices of `used` experts, x and router logits in, y out."""
    row = 2 * experts.hidden + experts.num_experts
    return round((used * 3 * experts.hidden * experts.inner + tokens * row) * ACTIVATION_BYTES)


def experts_flops(experts: Experts, tokens: int) -> int:
    """Of the three products of each token's experts."""
    return tokens * experts.top_k * 6 * experts.hidden * experts.inner
