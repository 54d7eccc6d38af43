"""The two optimisation profiles of a plan: one for steps that only decode, one for all others.

TensorRT chooses a kernel per profile for its usual sizes. Steps of one token a sequence and steps of a thousand tokens want
different ones.
"""

from __future__ import annotations

from qwenrt.runtime.engine_dir import EngineManifest
from qwenrt.runtime.plan import Profile, Range

_MAX_ELEMENTS = 2**31 - 1
"""Of a tensor, to TensorRT."""


def plan_profiles(manifest: EngineManifest) -> tuple[Profile, Profile]:
    """The profiles "decode" (T = S = R, up to max_num_seqs) and "prefill" (T up to max_num_batched_tokens), in this order.

    Usual sizes: a decode step of half of the sequences, a prefill step that is full. A captured decode step always has block
    tables of full width. The pool's size has no influence on kernels; it is bounded by what a tensor may hold.
    """
    limits = manifest.limits
    block = 2 * manifest.rank_kv_heads * manifest.block_size * manifest.model.head_dim
    width = -(-limits.max_model_len // manifest.block_size)
    sequences = size_range(limits.max_num_seqs, usual=limits.max_num_seqs // 2)
    tokens = size_range(limits.max_num_batched_tokens, usual=limits.max_num_batched_tokens)
    blocks = size_range(width, usual=width)
    pool = size_range(_MAX_ELEMENTS // block, usual=limits.max_num_seqs * width)
    return (
        Profile(
            name="decode",
            num_tokens=sequences,
            num_seqs=sequences,
            num_logits=sequences,
            max_blocks=blocks,
            num_blocks=pool,
        ),
        Profile(
            name="prefill",
            num_tokens=tokens,
            num_seqs=sequences,
            num_logits=sequences,
            max_blocks=blocks,
            num_blocks=pool,
        ),
    )


def size_range(largest: int, *, usual: int) -> Range:
    """A dimension from 1 to `largest`, `usual` moved into this range: TensorRT wants 0 < min <= opt <= max."""
    top = max(1, largest)
    return Range(min=1, opt=min(max(1, usual), top), max=top)


def dimension_ranges(profile: Profile) -> dict[str, Range]:
    """The range of each dimension by the name that it has in the graph."""
    sequences = profile.num_seqs
    return {
        "T": profile.num_tokens,
        "S": sequences,
        "S + 1": Range(min=sequences.min + 1, opt=sequences.opt + 1, max=sequences.max + 1),
        "R": profile.num_logits,
        "max_blocks": profile.max_blocks,
        "num_blocks": profile.num_blocks,
    }
