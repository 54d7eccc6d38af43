"""The emulator can fail: each of these faults, planted in a copy of the kernels, is found, and by the check that should."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gpu_check.cases import MIXED, make_call
from gpu_check.experts import check_experts, make_experts_call
from gpu_check.op import LaunchError
from gpu_check.op_suite import check
from tests.simt.build import KERNELS, Variant, build, missing

from .binding import EmulatedCuda

WRONG = "Not equal to tolerance"
RACE = "race in"


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in `file`; `found` is part of the message it must lead to."""

    name: str
    file: str
    old: str
    new: str
    found: str
    variant: Variant = Variant.FAST


MUTANTS = [
    Mutant(
        "prefill: no barrier before V is overwritten",
        "prefill.cu",
        "__syncthreads();  // K is here",
        "//",
        RACE,
        Variant.RACES,
    ),
    Mutant(
        "prefill: no barrier before V is read",
        "prefill.cu",
        "__syncthreads();  // V is here",
        "//",
        RACE,
        Variant.RACES,
    ),
    Mutant(
        "decode: slices without a warp barrier", "decode.cu", "__syncwarp();  // the slice", "//", RACE, Variant.RACES
    ),
    Mutant(
        "decode: merge over a ring in use", "decode.cu", "__syncthreads();  // every warp", "//", RACE, Variant.RACES
    ),
    Mutant(
        "decode: next segment during the merge", "decode.cu", "__syncthreads();  // the ring", "//", RACE, Variant.RACES
    ),
    Mutant(
        "decode: merge of what is not yet published",
        "decode.cu",
        "__syncthreads();  // all warps",
        "//",
        RACE,
        Variant.RACES,
    ),
    Mutant(
        "decode: two blocks leave their part in one slot",
        "decode.cu",
        "2 * block + (at == head_start ? 1 : 0)",
        "0",
        RACE,
        Variant.RACES,
    ),
    Mutant(
        "prefill: K read before its copy is waited for",
        "prefill.cu",
        "cp_async_wait<0>();\n            __syncthreads();  // K",
        "__syncthreads();  // K",
        WRONG,
    ),
    Mutant(
        "decode: wait for one copy too few",
        "decode.cu",
        "cp_async_wait<kStages - 2>",
        "cp_async_wait<kStages - 1>",
        "never waited for",
    ),
    Mutant(
        "prefill: 32 bytes too little",
        "prefill.cu",
        "sizeof(Shared<T, C, kHeadDim>))",
        "sizeof(Shared<T, C, kHeadDim>) - 32)",
        "outside",
        Variant.RACES,
    ),
    Mutant(
        "decode: 32 bytes too little",
        "decode.cu",
        "kRing > kMerge ? kRing : kMerge",
        "kRing - 32",
        "outside shared memory",
    ),
    Mutant(
        "prefill: next block table entry",
        "prefill.cu",
        "(tile * kTile) >> p.block_shift) + thread",
        "(tile * kTile) >> p.block_shift) + thread + 1",
        WRONG,
    ),
    Mutant(
        "decode: next block table entry",
        "decode.cu",
        "table(p, segment.sequence.index)[column]",
        "table(p, segment.sequence.index)[column + 1]",
        WRONG,
    ),
    Mutant(
        "write to the next block table entry",
        "rope_cache.cu",
        "shape.max_blocks + column]",
        "shape.max_blocks + column + 1]",
        WRONG,
    ),
    Mutant(
        "decode: heads dealt over KV heads",
        "decode.cu",
        "kv_head * p.group + row % p.group",
        "kv_head + row % p.group * p.args.shape.num_kv_heads",
        WRONG,
    ),
    Mutant(
        "prefill: heads dealt over KV heads",
        "prefill.cu",
        "kv_head * p.group + row % p.group",
        "kv_head + row % p.group * p.args.shape.num_kv_heads",
        WRONG,
    ),
    Mutant(
        "reduction: parts under their own maximum",
        "decode.cu",
        "fast_exp2(p.workspace.partial_max[part] - finite(merged.max))",
        "fast_exp2(0.0f)",
        WRONG,
    ),
    Mutant(
        "merge of warps: parts under their own maximum",
        "decode.cu",
        "fast_exp2(shared_max[part] - finite(merged.max))",
        "fast_exp2(0.0f)",
        WRONG,
    ),
    Mutant(
        "decode: sums not rescaled to the new maximum", "softmax.cuh", "rows.sum[half] * keep", "rows.sum[half]", WRONG
    ),
    Mutant(
        "shuffle where half of the warp has left",
        "rope_cache.cu",
        "const float inverse_rms",
        "if (!mine) continue;\n        const float inverse_rms",
        "divergent warp",
    ),
    Mutant(
        "prefill: slots that were never written", "prefill.cu", "&& token >= span.begin && token < span.end", "", WRONG
    ),
    Mutant(
        "decode: slots that were never written",
        "decode.cu",
        "&& token + row >= span.begin && token + row < span.end",
        "",
        WRONG,
    ),
    Mutant(
        "a token sees its successor",
        "paging.cuh",
        "max(position, -1) + 1 : length",
        "max(position, -1) + 2 : length",
        WRONG,
    ),
    Mutant("the window is one too long", "paging.cuh", "max(0, end - window)", "max(0, end - 1 - window)", WRONG),
    Mutant(
        "k is not normalised",
        "rope_cache.cu",
        "if (weights != nullptr) {",
        "if (head < shape.num_heads && weights != nullptr) {",
        WRONG,
    ),
    Mutant(
        "rotation of interleaved pairs' sign",
        "rope_cache.cu",
        "second * cos.v[i] + first",
        "second * cos.v[i] - first",
        WRONG,
    ),
    Mutant(
        "prefill: more shared memory than was asked for",
        "prefill.cu",
        "cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes",
        "cudaFuncAttributeMaxDynamicSharedMemorySize, 0",
        "cudaError 1",
    ),
    Mutant(
        "experts: a stage overwritten while it is read",
        "experts.cu",
        "__syncthreads();  // this step",
        "//",
        RACE,
        Variant.RACES,
    ),
    Mutant(
        "sort: sums of warps that are not there yet",
        "routing.cu",
        "__syncthreads();  // every warp",
        "//",
        RACE,
        Variant.RACES,
    ),
    Mutant(
        "experts: wait for one copy too few", "experts.cu", "wait<kStages - 2>", "wait<kStages - 1>", "never waited for"
    ),
    Mutant(
        "experts: 32 bytes too little",
        "experts.cu",
        "static_cast<int>(sizeof(Stage));\n};",
        "static_cast<int>(sizeof(Stage)) - 32;\n};",
        "outside",
    ),
    Mutant(
        "experts: more shared memory than was asked for",
        "experts.cu",
        "cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes",
        "cudaFuncAttributeMaxDynamicSharedMemorySize, 0",
        "cudaError 1",
    ),
    Mutant("experts: summed beyond the depth", "experts.cu", "inside = at < depth", "inside = true", WRONG),
    Mutant("experts: silu of up", "experts.cu", "silu(low) * sums[i][j + kResults]", "low * sums[i][j]", WRONG),
    Mutant("experts: half of the stride", "experts.cu", "(kGated ? 2 : 1) * width", "width", WRONG),
    Mutant("experts: full tiles only", "experts.cu", "+ kTileRows - 1) / kTileRows;", ") / kTileRows;", WRONG),
    Mutant(
        "experts: too few tiles",
        "experts.cu",
        "p.pairs / Tiling::kTileRows + (p.pairs < shape.num_experts ? p.pairs : shape.num_experts)",
        "p.pairs / Tiling::kTileRows + 1",
        WRONG,
    ),
    Mutant(
        "experts: one fragment of two", "experts.cu", "if (i * 16 >= active) continue;", "if (i > 0) continue;", WRONG
    ),
    Mutant("choose: the higher number first", "routing.cu", "a.expert < b.expert);", "a.expert > b.expert);", WRONG),
    Mutant("choose: always normalised", "routing.cu", "if (shape.norm_topk_prob != 0)", "", WRONG),
    Mutant(
        "choose: shuffle where lanes have left",
        "routing.cu",
        "float kept = 0.0f;",
        "if (lane >= shape.top_k) return;\n    float kept = 0.0f;",
        "divergent warp",
    ),
    Mutant("sort: rows of lower experts", "routing.cu", "all.below + earlier.equal", "earlier.equal", WRONG),
    Mutant("sort: two pairs in one row", "routing.cu", "        ++row;\n", "", WRONG),
    Mutant("sort: another token", "routing.cu", "pair / p.args.shape.top_k", "pair % p.args.shape.num_tokens", WRONG),
    Mutant("gather: shares too large", "routing.cu", "share * one.v[k]", "(share + 1.0f) * one.v[k]", WRONG),
]
EXPERTS = ("experts.cu", "routing.cu")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_found(mutant: Mutant, tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    kernels = tmp_path / "cuda"
    shutil.copytree(KERNELS, kernels)
    source = (kernels / mutant.file).read_text()
    assert source.count(mutant.old) == 1, (
        f"{mutant.file} has {source.count(mutant.old)} of {mutant.old!r}: update the mutant"
    )
    (kernels / mutant.file).write_text(source.replace(mutant.old, mutant.new))
    run = run_enough_experts if mutant.file in EXPERTS else run_enough
    with pytest.raises((AssertionError, LaunchError), match=mutant.found):
        run(EmulatedCuda(build(mutant.variant, kernels), num_sms=1))


def run_enough(cuda: EmulatedCuda) -> None:
    """Few calls that reach every line: windows, warps that are not full, rings that wrap, more than 48 KiB of shared memory."""
    check(cuda, make_call(MIXED, dtype=ml_dtypes.bfloat16, num_heads=6, sliding_window=20, padding_rows=2))
    check(cuda, make_call([(1, 700), (40, 140), (1, 300)], dtype=np.float16, head_dim=128, num_heads=2, num_kv_heads=1))


def run_enough_experts(cuda: EmulatedCuda) -> None:
    """The same: rings that wrap, tiles that are not full along any side, experts without tokens, equal logits, both norms."""
    check_experts(cuda, make_experts_call(70, 12, 3, 264, 72, dtype=ml_dtypes.bfloat16))
    check_experts(cuda, make_experts_call(16, 12, 3, 392, 72, dtype=ml_dtypes.bfloat16))
    check_experts(cuda, make_experts_call(300, 3, 1, 72, 200, dtype=np.float16, norm=0))


def test_the_kernels_themselves_have_no_race() -> None:
    if reason := missing():
        pytest.skip(reason)
    run_enough(EmulatedCuda(build(Variant.RACES)))
    run_enough_experts(EmulatedCuda(build(Variant.RACES)))
    cuda = EmulatedCuda(build(Variant.RACES), seed=1, num_sms=4)
    run_enough(cuda)
    for head_dim in (64, 128):
        call = make_call(MIXED, dtype=np.float16, kv_dtype=ml_dtypes.float8_e4m3fn, head_dim=head_dim)
        cuda.paged_attention(**call.tensors, **call.attributes)
