"""Qwen3 in PyTorch over a flat batch of tokens: attention is one custom op on a paged KV cache, a mixture of experts another.

Qwen2 and Llama are the same decoder without the norms of q and k and with other biases, so these modules are theirs too. Their
judges are transformers' Qwen3ForCausalLM and its siblings. What differs is the layout: tokens of all sequences lie back to back
in [T, ...], q, k and v come from one projection and so do gate and up, and q/k norm, RoPE, cache and attention are
`torch.ops.qwenrt.paged_attention`. Parameters are float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwenrt.plugins import torch_experts, torch_op  # noqa: F401  (they register torch.ops.qwenrt)

from .config import ModelConfig
from .experts import ExpertsSpec
from .parallel_modules import AllReduce, SharedKVProjection, VocabParallelHead, summed_linear
from .tensor_parallel import ONE_RANK, TensorParallel


class Batch(NamedTuple):
    """What attention must know of a step, all int32: tokens' positions [T], and per sequence blocks, length, first row."""

    positions: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [T, size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Qwen3Attention(nn.Module):
    """Projections around PagedAttention."""

    def __init__(self, config: ModelConfig, layer: int, block_size: int, tp: TensorParallel) -> None:
        super().__init__()
        packed = config.q_size + 2 * config.kv_size
        self.qkv_proj: nn.Module = (
            SharedKVProjection(config)
            if tp.shares_kv
            else nn.Linear(config.hidden_size, packed, bias=config.attention_bias)
        )
        self.o_proj = summed_linear(config.q_size, config.hidden_size, config.output_bias, tp)
        norm_size = config.head_dim if config.qk_norm else 0
        self.q_norm = RMSNorm(norm_size, config.rms_norm_eps)
        self.k_norm = RMSNorm(norm_size, config.rms_norm_eps)
        self.config = config
        self.block_size = block_size
        self.sliding_window = config.sliding_windows[layer]

    def forward(self, x: Tensor, rope: Tensor, batch: Batch, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Attention output [T, hidden] and this layer's cache after the step."""
        config = self.config
        attn, kv_cache_out = torch.ops.qwenrt.paged_attention(
            self.qkv_proj(x),
            self.q_norm.weight,
            self.k_norm.weight,
            rope,
            batch.positions,
            kv_cache,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self.block_size,
            1 / math.sqrt(config.head_dim),
            config.rms_norm_eps,
            self.sliding_window,
        )
        return self.o_proj(attn), kv_cache_out


class Qwen3MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = summed_linear(config.intermediate_size, config.hidden_size, config.mlp_bias, tp)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        down: Tensor = self.down_proj(F.silu(gate) * up)
        return down


class Qwen3Experts(nn.Module):
    """The matrices of a layer's experts, one below the other; gate_up_proj has each expert's gate, then its up."""

    def __init__(self, hidden: int, spec: ExpertsSpec) -> None:
        super().__init__()
        count, inner = spec.num_experts, spec.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count * 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count * hidden, inner))


class Qwen3SparseMoeBlock(nn.Module):
    """A router, and the experts that it shares tokens out to."""

    def __init__(self, config: ModelConfig, spec: ExpertsSpec, tp: TensorParallel) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, spec.num_experts, bias=False)
        self.experts = Qwen3Experts(config.hidden_size, spec)
        self.all_reduce = nn.Identity() if tp.size == 1 else AllReduce(tp)
        self.spec = spec

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        y = torch.ops.qwenrt.mixture_of_experts(
            x,
            self.gate(x),
            self.experts.gate_up_proj,
            self.experts.down_proj,
            *[None] * 8,  # the parts of integers
            self.spec.top_k,
            int(self.spec.norm_topk_prob),
        )
        summed: Tensor = self.all_reduce(y)
        return summed


class Qwen3DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: ModelConfig, layer: int, block_size: int, tp: TensorParallel = ONE_RANK) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, layer, block_size, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        experts = config.experts if config.experts and config.experts.layers[layer] else None
        self.mlp = Qwen3SparseMoeBlock(config, experts, tp) if experts else Qwen3MLP(config, tp)

    def forward(self, x: Tensor, rope: Tensor, batch: Batch, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream [T, hidden] after this layer, and its cache."""
        attn, kv_cache_out = self.self_attn(self.input_layernorm(x), rope, batch, kv_cache)
        x = x + attn
        return x + self.mlp(self.post_attention_layernorm(x)), kv_cache_out


class Qwen3Model(nn.Module):
    """Embedding and decoder layers. The final norm belongs to it by name, and is applied by Qwen3ForCausalLM to few rows."""

    def __init__(self, config: ModelConfig, block_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, layer, block_size, tp) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: Tensor, rope: Tensor, batch: Batch, kv_caches: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The residual stream [T, hidden] before the final norm, and every layer's cache."""
        x = self.embed_tokens(input_ids)
        outputs = []
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, kv_cache_out = layer(x, rope, batch, kv_cache)
            outputs.append(kv_cache_out)
        return x, outputs


class Qwen3ForCausalLM(nn.Module):
    """The whole graph of an engine: token ids and caches in, what its task's head gives for chosen rows and caches out.

    Task generate: logits of the vocabulary, through lm_head or the embedding if it is tied; classify: logits of the labels,
    through the head `score`; embed: the hidden states themselves.
    `block_size` is the KV cache's, `max_model_len` the number of positions of the RoPE table. `tp`: this is one of several ranks
    and has its own part of what `config` describes.
    """

    def __init__(
        self, config: ModelConfig, *, block_size: int, max_model_len: int, tp: TensorParallel = ONE_RANK
    ) -> None:
        super().__init__()
        self.model = Qwen3Model(tp.rank_view(config), block_size, tp)
        if config.task == "generate" and tp.size > 1:
            self.lm_head: nn.Linear = VocabParallelHead(config, tp)
        elif config.has_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.task == "classify":
            self.score = nn.Linear(config.hidden_size, len(config.labels), bias=False)
        self.register_buffer("rope", torch.empty(max_model_len, config.head_dim))
        self.rope: Tensor
        self.config = config

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        logits_indices: Tensor,
        kv_caches: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [R, vocab], [R, labels] or [R, hidden] of the rows `logits_indices` [R], and the caches after the step.

        Index inputs are int32.
        """
        batch = Batch(positions, block_tables, seq_lens, query_start)
        x, kv_caches_out = self.model(input_ids, self.rope, batch, kv_caches)
        x = self.model.norm(torch.index_select(x, 0, logits_indices))
        if isinstance(getattr(self, "lm_head", None), VocabParallelHead):
            x = self.lm_head(x)
        elif self.config.task == "generate":
            # F.linear, or a tied head's transpose would become a second copy of the embedding in the graph.
            head = self.lm_head if self.config.has_lm_head else self.model.embed_tokens
            x = F.linear(x, head.weight)
        elif self.config.task == "classify":
            x = self.score(x)
        return x, kv_caches_out


def parameter_sources(config: ModelConfig, *, shares_kv: bool = False) -> dict[str, tuple[str, ...]]:
    """For each parameter of Qwen3ForCausalLM, the checkpoint tensors that it is made of, one below the other.

    None where a family has no norms of q and k: these parameters are empty. shares_kv: as `TensorParallel` has it. A rank's head
    that is rows of the embedding is not among them.
    """
    sources: dict[str, tuple[str, ...]] = {"model.embed_tokens.weight": ("model.embed_tokens.weight",)}
    q, k, v, o = (f"self_attn.{name}_proj" for name in "qkvo")
    attention = {"self_attn.qkv_proj": ((q, k, v), config.attention_bias), o: ((o,), config.output_bias)}
    if shares_kv:
        attention["self_attn.qkv_proj.q_proj"] = ((q,), config.attention_bias)
        attention["self_attn.qkv_proj.kv_proj"] = ((k, v), config.attention_bias)
        del attention["self_attn.qkv_proj"]
    mlp = {
        "mlp.gate_up_proj": (("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
        "mlp.down_proj": (("mlp.down_proj",), config.mlp_bias),
    }
    spec = config.experts
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        sparse = spec is not None and spec.layers[layer]
        if spec and sparse:
            experts = [f"{prefix}mlp.experts.{expert}." for expert in range(spec.num_experts)]
            sources[prefix + "mlp.gate.weight"] = (prefix + "mlp.gate.weight",)
            sources[prefix + "mlp.experts.gate_up_proj"] = tuple(
                f"{expert}{part}_proj.weight" for expert in experts for part in ("gate", "up")
            )
            sources[prefix + "mlp.experts.down_proj"] = tuple(f"{expert}down_proj.weight" for expert in experts)
        for name, (parts, bias) in (attention if sparse else attention | mlp).items():
            for kind in ("weight", "bias") if bias else ("weight",):
                sources[f"{prefix}{name}.{kind}"] = tuple(f"{prefix}{part}.{kind}" for part in parts)
        for name in ("input_layernorm", "post_attention_layernorm"):
            sources[f"{prefix}{name}.weight"] = (f"{prefix}{name}.weight",)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            sources[f"{prefix}{name}.weight"] = (f"{prefix}{name}.weight",) if config.qk_norm else ()
    sources["model.norm.weight"] = ("model.norm.weight",)
    if config.has_lm_head:
        sources["lm_head.weight"] = ("lm_head.weight",)
    if config.task == "classify":
        sources["score.weight"] = ("score.weight",)
    return sources
