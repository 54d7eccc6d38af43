"""The tensors of a step on the GPU, as a model's layers see them: one step, a pool for each of several layers."""

from __future__ import annotations

import ctypes

import torch

from qwenrt.plugins import torch_experts
from qwenrt.plugins.cuda_api import DATA_TYPES, Args, CudaKernels, ExpertsArgs, ExpertsShape, Shape
from qwenrt.plugins.schema import MIXTURE_OF_EXPERTS

from .model import Experts, Heads

BLOCK_SIZE = 32
"""Tokens in a block of the pool: what `qwenrt export` takes unless told otherwise."""
_CHUNK = 1 << 28  # elements of random numbers made at a time


class Step:
    """`batch` sequences, each with `rows` rows in the step and `context` tokens after it, their blocks in random order.

    Every pool has other numbers in it, so that a launch per pool finds nothing of its own in the GPU's cache.
    """

    def __init__(
        self, kernels: CudaKernels, heads: Heads, batch: int, rows: int, context: int, kv_dtype: torch.dtype, pools: int
    ) -> None:
        self.kernels, self.heads, self.batch, self.context = kernels, heads, batch, context
        columns = -(-context // BLOCK_SIZE)
        size = batch * columns, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim
        self.pools = [random_tensor(size, kv_dtype) for _ in range(pools)]
        self.tables = torch.randperm(batch * columns, device="cuda").to(torch.int32).view(batch, columns)
        tokens = batch * rows
        self.qkv = random_tensor((tokens, heads.qkv_width), torch.bfloat16)
        self.norm = random_tensor((heads.head_dim,), torch.bfloat16)
        angles = torch.rand(context, heads.head_dim // 2, device="cuda") * 6
        self.rope = torch.cat([angles.cos(), angles.sin()], 1)
        self.positions = torch.arange(context - rows, context, dtype=torch.int32, device="cuda").repeat(batch)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(0, tokens + 1, rows, dtype=torch.int32, device="cuda")
        self.attn = torch.empty(tokens, heads.num_heads, heads.head_dim, dtype=torch.bfloat16, device="cuda")
        shape = Shape(
            num_tokens=tokens,
            num_seqs=batch,
            max_blocks=columns,
            num_blocks=batch * columns,
            max_positions=context,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            block_size=BLOCK_SIZE,
            sliding_window=-1,
            scale=heads.head_dim**-0.5,
            norm_eps=1e-6,
            dtype=DATA_TYPES["bfloat16"],
            kv_dtype=DATA_TYPES[str(kv_dtype).removeprefix("torch.")],
        )
        self.workspace = torch.empty(kernels.workspace_size(shape), dtype=torch.uint8, device="cuda")
        self.args = Args(
            shape=shape,
            qkv=self.qkv.data_ptr(),
            q_norm=self.norm.data_ptr(),
            k_norm=self.norm.data_ptr(),
            rope=self.rope.data_ptr(),
            positions=self.positions.data_ptr(),
            block_tables=self.tables.data_ptr(),
            seq_lens=self.lengths.data_ptr(),
            query_start=self.starts.data_ptr(),
            attn=self.attn.data_ptr(),
            workspace=self.workspace.data_ptr(),
            workspace_size=self.workspace.numel(),
        )

    def launch(self, entry: str, pool: int = 0) -> None:
        """Queues a launcher of the kernels on PyTorch's current stream. Raises RuntimeError if CUDA refuses."""
        self.args.kv_cache = self.args.kv_cache_out = self.pools[pool].data_ptr()
        self.args.stream = torch.cuda.current_stream().cuda_stream
        status = getattr(self.kernels.library, entry)(ctypes.byref(self.args))
        if status:
            raise RuntimeError(f"{entry}: cudaError_t {status}")

    def gathered(self, pool: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as if they had never been paged: each [batch, num_kv_heads, context, head_dim]."""
        both = torch.empty(
            2,
            self.batch,
            self.heads.num_kv_heads,
            self.context,
            self.heads.head_dim,
            dtype=torch.bfloat16,
            device="cuda",
        )
        for sequence, table in enumerate(self.tables):
            # [columns, 2, Hkv, block_size, D]; as bytes, since not every version of PyTorch picks out float8.
            blocks = self.pools[pool].view(torch.uint8)[table].view(self.pools[pool].dtype)
            both[:, sequence] = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.context]
        return both[0], both[1]


class ExpertsStep:
    """A layer of bfloat16 experts, and the routing of `tokens` tokens for each of several steps.

    Every step has other experts for its tokens, so that a launch per step finds little of its own in the GPU's cache.
    """

    def __init__(self, kernels: CudaKernels, experts: Experts, tokens: int, steps: int) -> None:
        self.kernels, self.experts = kernels, experts
        dtype = torch.bfloat16
        self.x = random_tensor((tokens, experts.hidden), dtype)
        self.logits = [random_tensor((tokens, experts.num_experts), dtype) for _ in range(steps)]
        self.gate_up = random_tensor((experts.num_experts * 2 * experts.inner, experts.hidden), dtype)
        self.down = random_tensor((experts.num_experts * experts.hidden, experts.inner), dtype)
        # As they are in a model: so that an output is about as large as x.
        self.gate_up *= experts.hidden**-0.5
        self.down *= experts.inner**-0.5
        self.y = torch.empty_like(self.x)
        shape = ExpertsShape(
            num_tokens=tokens,
            num_experts=experts.num_experts,
            top_k=experts.top_k,
            hidden=experts.hidden,
            inner=experts.inner,
            norm_topk_prob=1,
            dtype=DATA_TYPES["bfloat16"],
        )
        self.workspace = torch.empty(kernels.workspace_size(shape), dtype=torch.uint8, device="cuda")
        self.args = ExpertsArgs(
            shape=shape,
            x=self.x.data_ptr(),
            gate_up=self.gate_up.data_ptr(),
            down=self.down.data_ptr(),
            y=self.y.data_ptr(),
            workspace=self.workspace.data_ptr(),
            workspace_size=self.workspace.numel(),
        )

    def launch(self, step: int = 0) -> None:
        """Queues the op on PyTorch's current stream. Raises RuntimeError if CUDA refuses."""
        self.args.router_logits = self.logits[step].data_ptr()
        self.args.stream = torch.cuda.current_stream().cuda_stream
        status = self.kernels.library.qwenrt_mixture_of_experts(ctypes.byref(self.args))
        if status:
            raise RuntimeError(f"qwenrt_mixture_of_experts: cudaError_t {status}")

    def expected(self, step: int = 0) -> torch.Tensor:
        """y by PyTorch, in float32."""
        x, logits = self.x.float(), self.logits[step].float()
        tensors = x, logits, self.gate_up, self.down
        absent = [None] * (len(MIXTURE_OF_EXPERTS.inputs) - len(tensors))  # those of integers
        y: torch.Tensor = torch_experts.mixture_of_experts(*tensors, *absent, self.experts.top_k, 1)
        return y

    def mean_used(self) -> float:
        """Experts that a step's tokens go to, over the steps."""
        chosen: list[int] = [logits.topk(self.experts.top_k).indices.unique().numel() for logits in self.logits]
        return sum(chosen) / len(chosen)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of the normal distribution; never zeros, on which a GPU computes faster than on anything else."""
    tensor = torch.empty(shape, dtype=dtype, device="cuda")
    for piece in tensor.view(-1).split(_CHUNK):
        piece.copy_(torch.randn(piece.shape, dtype=torch.bfloat16, device="cuda"))
    return tensor
