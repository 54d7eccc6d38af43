"""The custom ops in NumPy, slow and obvious: what every implementation is tested against."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import panels
from .errors import ConfigError
from .schema import INT8_SCALE_BYTES

Array = npt.NDArray[Any]


def paged_attention(
    qkv: Array,
    q_norm: Array,
    k_norm: Array,
    rope: Array,
    positions: Array,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    scale: float,
    norm_eps: float = 1e-6,
    sliding_window: int = -1,
) -> tuple[Array, Array]:
    """PagedAttention as `schema.PAGED_ATTENTION` has it: shapes and types there; returns (attn, kv_cache_out), both new.

    Computes in float64 and rounds to the types of kv_cache (K and V) and qkv (attn). Raises ConfigError naming the input that
    breaks the contract.
    """
    check_paged_attention(
        qkv, q_norm, k_norm, rope, positions, kv_cache, block_tables, seq_lens, query_start,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
    )  # fmt: skip
    rows = [range(query_start[s], query_start[s + 1]) for s in range(len(seq_lens))]
    num_rows = query_start[-1]
    heads = qkv[:num_rows].astype(np.float64).reshape(num_rows, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
    angles = rope[positions[:num_rows]].astype(np.float64)
    q = rotate(rms_norm(q, q_norm, norm_eps), angles)
    k = rotate(rms_norm(k, k_norm, norm_eps), angles)
    cache = kv_cache.copy()
    for s, own in enumerate(rows):
        for row in own:
            block, slot = block_tables[s, positions[row] // block_size], positions[row] % block_size
            cache[block, 0, :, slot] = kv_rows(k[row], cache.dtype)
            cache[block, 1, :, slot] = kv_rows(v[row], cache.dtype)
    attn = np.zeros((len(qkv), num_heads, head_dim), qkv.dtype)
    for s, own in enumerate(rows):
        for row in own:
            last = positions[row]
            seen = np.arange(0 if sliding_window < 0 else max(0, last - sliding_window + 1), last + 1)
            context = kv_values(cache[block_tables[s, seen // block_size], :, :, seen % block_size])
            for head in range(num_heads):
                keys, values = context[:, :, head // (num_heads // num_kv_heads)].swapaxes(0, 1)
                scores = keys @ q[row, head] * scale
                weights = np.exp(scores - scores.max())
                attn[row, head] = weights @ values / weights.sum()
    return attn.reshape(len(qkv), num_heads * head_dim), cache


def kv_rows(x: Array, dtype: npt.DTypeLike) -> Array:
    """K or V [..., head_dim] as a KV pool of this type has it: int8 [..., head_dim + 4], or rounded to the type."""
    if dtype != np.int8:
        with np.errstate(over="ignore"):
            return x.astype(dtype)
    values, scale = round_rows(x.reshape(-1, x.shape[-1]).astype(np.float32))
    rows = np.concatenate([values, scale[:, None].view(np.int8)], axis=1)
    return rows.reshape(*x.shape[:-1], -1)


def kv_values(rows: Array) -> Array:
    """What rows of a KV pool stand for, [..., head_dim] float64."""
    if rows.dtype != np.int8:
        return rows.astype(np.float64)
    values, scale = np.split(rows, [-INT8_SCALE_BYTES], axis=-1)
    plain: Array = values * np.ascontiguousarray(scale).view(np.float32).astype(np.float64)
    return plain


def linear(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    scale: Array | None = None,
    groups: Array | None = None,
    adapters: Array | None = None,
    lora_a: Array | None = None,
    lora_b: Array | None = None,
    group_scale: Array | None = None,
    group_offset: Array | None = None,
) -> Array:
    """Linear as `schema.LINEAR` has it: y [M, N] float32.

    Float weights, what adapters add, and integer weights with group_scale are computed in float64; others to the bit.
    """
    if group_scale is not None and scale is not None:
        y = _grouped_linear(x, _grouped(weight, groups, group_scale, group_offset, len(scale), x.shape[1]), bias, scale)
    else:
        y = _plain_linear(x, weight, bias, scale, groups)
    if adapters is not None and lora_a is not None and lora_b is not None:
        for row, adapter in enumerate(adapters):
            if adapter >= 0:
                low = lora_a[adapter].astype(np.float64) @ x[row]
                y[row] += (low @ lora_b[adapter].astype(np.float64)).astype(np.float32)
    return y


def _plain_linear(x: Array, weight: Array, bias: Array | None, scale: Array | None, groups: Array | None) -> Array:
    if scale is None:
        products = x.astype(np.float64) @ weight.astype(np.float64).T
        return (products if bias is None else products + bias).astype(np.float32)
    values, x_scale = round_rows(x)
    codes = _unpacked(weight, groups, len(scale), x.shape[1])
    sums = (values.astype(np.int64) @ codes.astype(np.int64).T).astype(np.float32)
    y: Array = sums * (x_scale[:, None] * scale)
    return y if bias is None else y + bias


def _grouped_linear(x: Array, weight: Array, bias: Array | None, scale: Array) -> Array:
    values, x_scale = round_rows(x)
    products = values.astype(np.float64) @ weight.astype(np.float64).T * (x_scale[:, None] * scale)
    y: Array = products if bias is None else products + bias
    return y.astype(np.float32)


def embedding(
    ids: Array,
    weight: Array,
    scale: Array,
    groups: Array | None = None,
    group_scale: Array | None = None,
    group_offset: Array | None = None,
    *,
    depth: int,
) -> Array:
    """Embedding as `schema.EMBEDDING` has it: y [T, depth] float32."""
    if group_scale is None:
        whole = _unpacked(weight, groups, len(scale), depth)
    else:
        whole = _grouped(weight, groups, group_scale, group_offset, len(scale), depth)
    rows: Array = whole[ids] * scale[ids, None]
    return rows


def _grouped(
    weight: Array, groups: Array | None, group_scale: Array, group_offset: Array | None, width: int, depth: int
) -> Array:
    """integer * group_scale + group_offset [N, K], float32."""
    padded = weight.shape[1] * (4 if groups is None else 8)
    scales = panels.unpack_group_values(group_scale, width, padded)[:, :depth]
    products: Array = _unpacked(weight, groups, width, depth) * scales
    if group_offset is not None:
        products = products + panels.unpack_group_values(group_offset, width, padded)[:, :depth]
    return products


def _unpacked(weight: Array, groups: Array | None, width: int, depth: int) -> Array:
    if groups is None:
        return panels.unpack_int8(weight, width, depth)
    return panels.unpack_int4(weight, groups, width, depth)


def round_rows(x: Array) -> tuple[Array, Array]:
    """Rows of float32 [M, K] as int8 values [M, K] and float32 scales [M]: x is about value * scale, the largest value 127."""
    largest = np.abs(x).max(axis=1, initial=0)
    usable = (largest >= np.float32(2.0**-100)) & np.isfinite(largest)
    scale = np.where(usable, largest / np.float32(127), np.where(np.isfinite(largest), 0, np.nan)).astype(np.float32)
    factor = np.where(usable, np.float32(127) / np.where(usable, largest, 1), 0).astype(np.float32)
    values = np.rint(np.where(usable[:, None], x, 0) * factor[:, None])
    return values.astype(np.int8), scale


def swi_glu(gate_up: Array) -> Array:
    """SwiGlu as `schema.SWIGLU` has it: y [T, inner] float32, computed in float64."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        y: Array = gate / (1 + np.exp(-gate)) * up
    return y.astype(np.float32)


def mixture_of_experts(
    x: Array,
    router_logits: Array,
    gate_up: Array,
    down: Array,
    gate_up_scale: Array | None = None,
    down_scale: Array | None = None,
    gate_up_groups: Array | None = None,
    down_groups: Array | None = None,
    gate_up_group_scale: Array | None = None,
    down_group_scale: Array | None = None,
    gate_up_group_offset: Array | None = None,
    down_group_offset: Array | None = None,
    *,
    top_k: int,
    norm_topk_prob: int,
) -> Array:
    """MixtureOfExperts as `schema.MIXTURE_OF_EXPERTS` has it: y [T, hidden] float32, computed in float64.

    With integer matrices x and the inner values are rounded to int8, and come back as what they then stand for.
    """
    num_experts, hidden = router_logits.shape[1], x.shape[1]
    if gate_up_scale is not None and down_scale is not None:
        inner = len(gate_up_scale) // (2 * num_experts)
        gate_up_parts = gate_up_scale, gate_up_groups, gate_up_group_scale, gate_up_group_offset
        gate_up = embedding(np.arange(len(gate_up_scale)), gate_up, *gate_up_parts, depth=hidden)
        down_parts = down_scale, down_groups, down_group_scale, down_group_offset
        down = embedding(np.arange(len(down_scale)), down, *down_parts, depth=inner)
    gates = gate_up.astype(np.float64).reshape(num_experts, 2, -1, hidden)
    downs = down.astype(np.float64).reshape(num_experts, hidden, -1)
    rounded = (lambda row: row) if gate_up_scale is None else _as_rounded
    y = np.zeros(x.shape)
    for token, logits in enumerate(router_logits.astype(np.float64)):
        chosen = np.argsort(-logits, kind="stable")[:top_k]
        shares = np.exp(logits - logits.max())
        shares /= shares[chosen].sum() if norm_topk_prob else shares.sum()
        for expert in chosen:
            gate, up = gates[expert] @ rounded(x[token].astype(np.float64))
            y[token] += shares[expert] * (downs[expert] @ rounded(gate / (1 + np.exp(-gate)) * up))
    return y.astype(np.float32)


def _as_rounded(row: Array) -> Array:
    """What a row stands for once it is rounded to int8."""
    values, scale = round_rows(row[None].astype(np.float32))
    whole: Array = values[0].astype(np.float64) * scale[0]
    return whole


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019); x itself if the weight is empty."""
    if weight.size == 0:
        return x
    normed: Array = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight.astype(x.dtype)
    return normed


def rotate(x: Array, angles: Array) -> Array:
    """Rotary embedding of x [T, heads, D] by angles [T, D], cos then sin; column i pairs with i + D/2."""
    cos, sin = np.split(angles[:, None], 2, axis=-1)
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def check_paged_attention(
    qkv: Array,
    q_norm: Array,
    k_norm: Array,
    rope: Array,
    positions: Array,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    """Raise ConfigError naming the input, the place and the value if the inputs break the op's contract."""
    num_tokens, num_seqs = qkv.shape[0], len(seq_lens)
    kv_row = head_dim + INT8_SCALE_BYTES * (kv_cache.dtype == np.int8)
    for name, array, shape in (
        ("qkv", qkv, (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)),
        ("rope", rope, (rope.shape[0], head_dim)),
        ("positions", positions, (num_tokens,)),
        ("kv_cache", kv_cache, (kv_cache.shape[0], 2, num_kv_heads, block_size, kv_row)),
        ("block_tables", block_tables, (num_seqs, block_tables.shape[-1])),
        ("query_start", query_start, (num_seqs + 1,)),
    ):
        if array.shape != shape:
            raise ConfigError(f"{name} has shape {list(array.shape)}, must be {list(shape)}")
    for name, array in (("q_norm", q_norm), ("k_norm", k_norm)):
        if array.shape not in ((head_dim,), (0,)):
            raise ConfigError(f"{name} has shape {list(array.shape)}, must be [{head_dim}] or [0]")
    if query_start[0] != 0 or (np.diff(query_start) < 0).any() or query_start[-1] > num_tokens:
        raise ConfigError(f"query_start is {query_start.tolist()}, must rise from 0 to at most {num_tokens}")
    for s in range(num_seqs):
        first, count = query_start[s], query_start[s + 1] - query_start[s]
        if not count:
            continue
        most = min(rope.shape[0], block_tables.shape[1] * block_size)
        if not count <= seq_lens[s] <= most:
            raise ConfigError(
                f"seq_lens[{s}] is {seq_lens[s]}, must be {count} (its rows) to {most} (rope, block_tables)"
            )
        if (positions[first : first + count] != np.arange(seq_lens[s] - count, seq_lens[s])).any():
            raise ConfigError(f"positions of sequence {s} must be {seq_lens[s] - count} to {seq_lens[s] - 1}")
        needed = block_tables[s, : -(-seq_lens[s] // block_size)]
        if (needed < 0).any() or (needed >= kv_cache.shape[0]).any():
            raise ConfigError(
                f"block_tables[{s}] is {needed.tolist()}; the pool has blocks 0 to {kv_cache.shape[0] - 1}"
            )


def sample_row(
    logits: Array, uniform: float, *, temperature: float, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> int:
    """The token of one row of logits [vocab], as `row_sampling.sample_rows` has it; temperature 0 for the largest logit."""
    peak = logits.max()
    if not np.isfinite(peak):
        return -1
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):
        scaled = (logits - peak) * np.float32(max(1 / temperature, float(np.finfo(np.float32).tiny)))
    weights = np.exp(scaled)
    if top_k > 0:
        weights[np.argsort(-logits, kind="stable")[top_k:]] = 0
    if min_p > 0:
        weights[scaled < np.float32(np.log(min_p))] = 0
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        sums = np.cumsum(weights[order], dtype=np.float64)
        weights[order[np.searchsorted(sums, top_p * sums[-1]) + 1 :]] = 0
    sums = np.cumsum(weights, dtype=np.float64)
    return int(min(np.searchsorted(sums, uniform * sums[-1], side="right"), weights.nonzero()[0][-1]))


def describe_row(logits: Array, count: int) -> tuple[float, list[int]]:
    """As `row_sampling.describe_row` has it, in float64."""
    if not np.isfinite(peak := logits.max()):
        return np.nan, []
    log_sum = float(peak) + float(np.log(np.exp(logits.astype(np.float64) - peak).sum()))
    return log_sum, np.argsort(-logits, kind="stable")[:count].tolist()
