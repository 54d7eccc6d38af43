"""The parts that time the kernels, each against what the same GPU reaches in the same run.

python -m gpu_check.bench LIBRARY rates|rope|decode|prefill|experts|flashinfer|xqa
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from qwenrt.plugins.cuda_api import CudaKernels

from .model import Experts, Heads, decode_bytes, experts_bytes, experts_flops, prefill_flops, rope_bytes
from .parts import Row, emit
from .step import BLOCK_SIZE, ExpertsStep, Step, random_tensor
from .timing import error_of, seconds_per_call, warm_up

Call = Callable[[], Any]
HEADS = Heads()
EXPERTS = Experts()
BATCHES = (1, 16, 64, 256)
CONTEXTS = (1024, 4096, 16384)
FEW_TOKENS, MANY_TOKENS = (1, 16, 64), (256, 1024, 4096)
"""Of a step over experts: where time is that of their matrices, and where it is that of the products."""
POOL_TYPES = (torch.bfloat16, torch.float8_e4m3fn)
_MATRIX = 8192
_COPY_BYTES = 4 << 30
_MAX_POOLS = 64
_MIN_CALLS = 4
_ROUTINGS = 16


def rates(_kernels: CudaKernels) -> Iterator[Row]:
    """What this GPU reaches: bytes read and written by a copy, and the bf16 products of two large matrices, a second."""
    source = random_tensor((_COPY_BYTES // 2,), torch.bfloat16)
    target = torch.empty_like(source)
    seconds = seconds_per_call([partial(target.copy_, source)])
    yield {"what": "copy", "seconds": seconds, "bytes": 2 * _COPY_BYTES}
    a, b = (random_tensor((_MATRIX, _MATRIX), torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    seconds = seconds_per_call(_enough([partial(torch.mm, a, b, out=product)]))
    yield {"what": "bf16 matmul", "seconds": seconds, "flops": 2 * _MATRIX**3}


def rope(kernels: CudaKernels) -> Iterator[Row]:
    """RMSNorm, RoPE and the cache write."""
    for kv_dtype in POOL_TYPES:
        for tokens in (64, 1024, 16384):
            step = Step(kernels, HEADS, 1, tokens, tokens, kv_dtype, pools=1)
            seconds = seconds_per_call(_per_pool(step, "qwenrt_rope_cache_write"))
            moved = rope_bytes(HEADS, tokens, kv_dtype.itemsize)
            yield {"pool": _name(kv_dtype), "tokens": tokens, "seconds": seconds, "bytes": moved}


def decode(kernels: CudaKernels) -> Iterator[Row]:
    """Decode attention, the whole op in such a step, and torch's attention over the same K and V without pages."""
    for kv_dtype in POOL_TYPES:
        for batch, context in _decode_sizes():
            moved = decode_bytes(HEADS, batch, context, kv_dtype.itemsize)
            row: Row = {"pool": _name(kv_dtype), "batch": batch, "context": context, "bytes": moved}
            # Times three: the pool, K and V gathered, and the blocks of a sequence on their way.
            if reason := _too_large(3 * moved):
                yield row | {"skipped": reason}
                continue
            step = Step(kernels, HEADS, batch, 1, context, kv_dtype, pools=_num_pools(moved))
            step.launch("qwenrt_rope_cache_write")
            query = step.attn.clone()
            step.launch("qwenrt_decode_attention")
            keys, values = step.gathered()
            row["error"] = error_of(step.attn, _torch_decode(query, keys, values))
            row["seconds"] = seconds_per_call(_per_pool(step, "qwenrt_decode_attention"))
            row["op_seconds"] = seconds_per_call(_per_pool(step, "qwenrt_paged_attention"))
            if kv_dtype == torch.bfloat16:
                contiguous = [(keys, values), *(step.gathered(pool) for pool in range(1, len(step.pools)))]
                row["torch_seconds"] = seconds_per_call(
                    _enough([partial(_torch_decode, query, *kv) for kv in contiguous])
                )
            yield row
            del step, keys, values, query
            torch.cuda.empty_cache()


def prefill(kernels: CudaKernels) -> Iterator[Row]:
    """Causal attention of one whole prompt, and torch's over the same K and V without pages."""
    for kv_dtype in POOL_TYPES:
        for tokens in CONTEXTS:
            step = Step(kernels, HEADS, 1, tokens, tokens, kv_dtype, pools=1)
            step.launch("qwenrt_rope_cache_write")
            query = step.attn.clone()
            step.launch("qwenrt_prefill_attention")
            keys, values = step.gathered()
            row: Row = {"pool": _name(kv_dtype), "tokens": tokens, "flops": prefill_flops(HEADS, tokens)}
            row["error"] = error_of(step.attn, _torch_prefill(query, keys, values))
            row["seconds"] = seconds_per_call(_per_pool(step, "qwenrt_prefill_attention"))
            if kv_dtype == torch.bfloat16:
                row["torch_seconds"] = seconds_per_call(_enough([partial(_torch_prefill, query, keys, values)]))
            yield row


def experts(kernels: CudaKernels) -> Iterator[Row]:
    """A layer's mixture of experts, the whole op."""
    for tokens in (*FEW_TOKENS, *MANY_TOKENS):
        step = ExpertsStep(kernels, EXPERTS, tokens, _ROUTINGS)
        step.launch()
        row: Row = {"pool": "bfloat16", "tokens": tokens, "error": error_of(step.y, step.expected())}
        if tokens in FEW_TOKENS:
            row["bytes"] = experts_bytes(EXPERTS, tokens, step.mean_used())
        else:
            row["flops"] = experts_flops(EXPERTS, tokens)
        row["seconds"] = seconds_per_call([partial(step.launch, routing) for routing in range(_ROUTINGS)])
        yield row


def flashinfer(kernels: CudaKernels) -> Iterator[Row]:
    """FlashInfer's kernels over the same pools: its layout HND is ours."""
    import flashinfer as library

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    sizes = (HEADS.num_heads, HEADS.num_kv_heads, HEADS.head_dim, BLOCK_SIZE)
    for tokens in CONTEXTS:
        step = Step(kernels, HEADS, 1, tokens, tokens, torch.bfloat16, pools=1)
        step.launch("qwenrt_rope_cache_write")
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(step.starts, *_pages(step), *sizes, causal=True, q_data_type=torch.bfloat16)
        seconds = seconds_per_call(_per_pool_of(wrapper, step))
        yield {"kernel": "prefill", "tokens": tokens, "seconds": seconds}
    for batch, context in _decode_sizes():
        moved = decode_bytes(HEADS, batch, context, torch.bfloat16.itemsize)
        if _too_large(2 * moved):
            continue
        step = Step(kernels, HEADS, batch, 1, context, torch.bfloat16, pools=_num_pools(moved))
        step.launch("qwenrt_rope_cache_write")
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*_pages(step), *sizes, q_data_type=torch.bfloat16)
        seconds = seconds_per_call(_per_pool_of(wrapper, step))
        yield {"kernel": "decode", "batch": batch, "context": context, "seconds": seconds}


def xqa(kernels: CudaKernels) -> Iterator[Row]:
    """TensorRT-LLM's decode kernels over the same pools, as FlashInfer has them. What they give is held against ours."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    for batch, context in _decode_sizes():
        moved = decode_bytes(HEADS, batch, context, torch.bfloat16.itemsize)
        if _too_large(2 * moved):
            continue
        step = Step(kernels, HEADS, batch, 1, context, torch.bfloat16, pools=_num_pools(moved))
        step.launch("qwenrt_rope_cache_write")
        query = step.attn.clone()
        step.launch("qwenrt_decode_attention")
        sizes = workspace, step.tables, step.lengths.view(torch.uint32), context, HEADS.head_dim**-0.5
        call = partial(xqa_batch_decode_with_kv_cache, kv_layout="HND")
        error = error_of(call(query, step.pools[0], *sizes), step.attn)
        seconds = seconds_per_call(_enough([partial(call, query, pool, *sizes) for pool in step.pools]))
        yield {"kernel": "decode", "batch": batch, "context": context, "seconds": seconds, "error": error}


def _decode_sizes() -> list[tuple[int, int]]:
    """(batch, context), the targets' sizes first: what is last is what a machine that is slow does without."""
    return sorted(((b, c) for b in BATCHES for c in CONTEXTS), key=lambda size: (size != (64, 4096), size[0] * size[1]))


def _num_pools(moved: int) -> int:
    """Of `moved` bytes each: enough that four times the GPU's cache lies between two uses of one."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return min(max(1, -(-4 * cache // moved)), _MAX_POOLS)


def _too_large(needed: int) -> str | None:
    free, _ = torch.cuda.mem_get_info()
    return None if needed < free else f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"


def _enough(calls: Sequence[Call]) -> list[Call]:
    """The calls, repeated if they are so few that the start of a graph would show in its time."""
    return [*calls] * -(-_MIN_CALLS // len(calls))


def _per_pool(step: Step, entry: str) -> list[Call]:
    return _enough([partial(step.launch, entry, pool) for pool in range(len(step.pools))])


def _per_pool_of(wrapper: Any, step: Step) -> list[Call]:
    query = step.attn.clone()
    return _enough([partial(wrapper.run, query, pool) for pool in step.pools])


def _pages(step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The step's block tables as FlashInfer has them: where each sequence's pages begin, the pages, tokens in each last one."""
    columns = step.tables.shape[1]
    begin = torch.arange(0, step.batch * columns + 1, columns, dtype=torch.int32, device="cuda")
    last = torch.full((step.batch,), step.context - (columns - 1) * BLOCK_SIZE, dtype=torch.int32, device="cuda")
    return begin, step.tables.flatten(), last


def _torch_decode(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[batch, num_heads, head_dim]: the query heads of a KV head as rows that see all tokens, so that K and V are read once."""
    batch, num_kv_heads = keys.shape[:2]
    grouped = query.view(batch, num_kv_heads, -1, query.shape[-1])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(grouped, keys, values).reshape(query.shape)


def _torch_prefill(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[tokens, num_heads, head_dim] of one sequence."""
    rows = query.transpose(0, 1).unsqueeze(0)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(rows, keys, values, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


BENCHES = {bench.__name__: bench for bench in (rates, rope, decode, prefill, experts, flashinfer, xqa)}


def main() -> int:
    """The command line."""
    library, name = sys.argv[1:]
    kernels = CudaKernels(Path(library))
    warm_up()
    for row in BENCHES[name](kernels):
        emit(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
