"""The one entry: a checkpoint becomes an engine folder."""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from qwenrt.plugins import ConfigError, QwenrtWarning
from qwenrt.plugins.schema import PAGED_ATTENTION
from qwenrt.runtime.engine_dir import EngineDir, EngineManifest, Limits, ModelSpec
from qwenrt.runtime.lora import MAX_RANK, LoraAdapter

from .checkpoint import expected_shapes
from .config import MAX_POSITIONS, ModelConfig
from .engine_writer import write_engine_dir
from .source import source_of
from .tensor_parallel import TensorParallel
from .tensorrt.plans import Notice, Progress, add_plans, plan_capabilities

_LOWERINGS = {"onnxruntime": ".lower.onnxruntime", "tensorrt": ".lower.tensorrt", "tensorrt-rtx": ".lower.tensorrt"}
TARGETS = tuple(_LOWERINGS)
_MAX_BLOCK_SIZE = 1024
_MAX_STEP = 1 << 20
_MAX_ROPE_ELEMENTS = 1 << 28


def export(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    target: str = "onnxruntime",
    task: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    kv_dtype: str | None = None,
    lora: str | os.PathLike[str] | None = None,
    max_lora_rank: int = 0,
    tp: int = 1,
    block_size: int = 32,
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 1024,
    compute_capabilities: Sequence[str] = (),
    strip_weights: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> EngineDir:
    """Write the engine folder `out` for a checkpoint, a folder, a hub id or a GGUF file, and return it.

    target: onnxruntime computes on the CPU; tensorrt also gives a plan for the GPU in this machine, tensorrt-rtx plans for
    `compute_capabilities` (8.9 and 12.0 by default), whatever is in it. task: generate, embed or classify, by default what
    the checkpoint is for (`ModelConfig.from_dir`). dtype: what is computed in: float32 on the CPU, bfloat16 (default) or
    float16 on a GPU. weights: how matrices are stored: float32, float16, bfloat16, int8, int4, int4-g64 or int4-g128 on the
    CPU, by default in the checkpoint's own float type, of which nothing is lost, or checkpoint, which keeps the integers of a
    quantised checkpoint; as dtype (default), fp8, fp8-channel or int4 on a GPU. kv_dtype: the KV cache's type: float32
    (default), float16 or int8 on the CPU; as dtype (default) or fp8 on a GPU. lora: folder of a PEFT adapter, merged into the
    matrices in float32. max_lora_rank: let requests name adapters of up to that rank at run time; 0: none. tp: ranks that the
    model's heads and matrices are shared out to, processes or GPUs, which backend torch runs. block_size: tokens in a KV block.
    max_model_len: tokens in a sequence, by default all positions of the model; more of them are a warning, for the model was
    not made for that, and with dynamic RoPE scaling they are how it is used. max_num_seqs and max_num_batched_tokens: sequences
    and tokens in a step. strip_weights: plans without weights; the runtime takes them from the weight file. overwrite: replace
    an engine folder that is there. notice: is told what was built.

    The folder appears when it is complete. Raises ConfigError, before anything is written where that can be known, naming what is
    wrong. Where a plan is all that cannot be built, it is raised after the rest was written: `build_plans` makes one from the
    folder, on a machine that has what is missing here.
    """
    lowering = _load(_LOWERINGS[_choice("target", target, TARGETS)])
    dtype = _choice("dtype", dtype or lowering.DTYPES[0], lowering.DTYPES)
    by_checkpoint = weights is None and target == "onnxruntime"
    weights = _choice("weights", weights or lowering.weight_formats(dtype)[0], lowering.weight_formats(dtype))
    kv_dtypes = lowering.kv_dtypes(dtype, weights)
    kv_dtype = _choice("kv_dtype", kv_dtype or kv_dtypes[0], kv_dtypes)
    capabilities = plan_capabilities(target, weights, compute_capabilities)
    _integer("block_size", block_size, _MAX_BLOCK_SIZE)
    if max_lora_rank != 0 and _integer("max_lora_rank", max_lora_rank, MAX_RANK) and target != "onnxruntime":
        raise ConfigError(f"adapters at run time are not built for {target}; merge one with --lora")
    report = progress or _silent
    report("reading the checkpoint", 0, 1)
    source = source_of(model, task)
    config = source.config
    TensorParallel.of(config, tp)
    if tp > 1:
        _check_sharded(tp, dtype, weights, max_lora_rank)
    if config.experts is not None and target != "onnxruntime" and weights != dtype:
        raise ConfigError(f"weights is {weights!r}, must be {dtype}: that is how experts are stored for {target}")
    limits = _limits(config, max_model_len, max_num_seqs, max_num_batched_tokens)
    checkpoint = source.checkpoint()
    checkpoint.check(config)
    if weights == "checkpoint" and (config.quantization is None or lora is not None):
        reason = "the checkpoint is not quantised" if lora is None else "an adapter is merged in floats"
        raise ConfigError(f"weights checkpoint keeps the integers of a checkpoint, but {reason}; take other weights")
    if lora is not None:
        checkpoint.merge(LoraAdapter.from_dir(lora), config)
    if by_checkpoint:
        weights = checkpoint.matrix_type(config)
    texts = source.texts()
    manifest = EngineManifest(
        producer=_producer(),
        target=target,
        task=config.task,
        labels=config.labels,
        model=model_spec(config),
        dtype=dtype,
        weights=weights,
        kv_dtype=kv_dtype,
        block_size=block_size,
        max_lora_rank=max_lora_rank,
        tp=tp,
        limits=limits,
        eos_token_ids=config.eos_token_ids,
        opset=lowering.OPSET,
        plugin_version=PAGED_ATTENTION.version,
    )
    report("reading the checkpoint", 1, 1)
    with write_engine_dir(out, overwrite=overwrite) as writer:
        # Torch is imported once the checkpoint and the place are known to be good.
        build = _load(".build")
        with _disk_errors(out):
            for name, data in texts.items():
                (writer.path / name).write_bytes(data)
            carried_over = build.write_model(writer.path, config, checkpoint, manifest, report)
            if carried_over is not None:
                (notice or _ignore)(carried_over)
            report("sealing", 0, 1)
            engine = writer.seal(manifest)
            report("sealing", 1, 1)
            no_plan = add_plans(engine, writer.path, capabilities, strip_weights, report, notice or _ignore)
    if no_plan is not None:
        raise ConfigError(
            f"engine folder {os.fspath(out)} has all but its plan, which was not built: {no_plan}. "
            f"Where it can be built, run: qwenrt build {os.fspath(out)}"
        )
    return EngineDir.open(out)


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _ignore(line: str) -> None:
    pass


def _load(module: str) -> Any:
    """A module of this package that needs the packages of the extra `export`."""
    try:
        return importlib.import_module(module, __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("qwenrt"):
            raise
        raise ConfigError(f"export needs {error.name}; install it with: pip install 'qwenrt[export]'") from None


def _choice(name: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, must be {' or '.join(allowed)}")
    return value


def _integer(name: str, value: int, high: int, remedy: str = "") -> int:
    if type(value) is not int or not 1 <= value <= high:
        raise ConfigError(f"{name} is {value!r}, must be an integer from 1 to {high}{remedy}")
    return value


def _check_sharded(tp: int, dtype: str, weights: str, max_lora_rank: int) -> None:
    """Raise ConfigError for what is not split over ranks."""
    if weights not in ("float32", "float16", "bfloat16"):
        plain = "float32, float16 or bfloat16" if dtype == "float32" else dtype
        raise ConfigError(f"weights is {weights!r} and tp is {tp}: what is split over ranks is stored in {plain}")
    if max_lora_rank:
        raise ConfigError(
            f"max_lora_rank is {max_lora_rank} and tp is {tp}: adapters at run time are not split over ranks; merge one with "
            "--lora"
        )


def _limits(config: ModelConfig, max_model_len: int | None, max_num_seqs: int, max_num_batched_tokens: int) -> Limits:
    positions = config.max_positions
    length = _integer("max_model_len", positions if max_model_len is None else max_model_len, MAX_POSITIONS)
    most = _MAX_ROPE_ELEMENTS // config.head_dim
    if length > most:
        raise ConfigError(f"max_model_len is {length}, must be at most {most} for a head_dim of {config.head_dim}")
    if length > positions:
        effect = "expect worse answers beyond them"
        if config.rope.type == "dynamic":
            effect = f"dynamic RoPE scaling now uses the frequencies of {length} tokens for shorter sequences too"
        warnings.warn(
            f"max_model_len is {length} and the model has {positions} positions; {effect}", QwenrtWarning, stacklevel=3
        )
    tokens = _integer("max_num_batched_tokens", max_num_batched_tokens, _MAX_STEP)
    return Limits(
        max_num_seqs=_integer("max_num_seqs", max_num_seqs, tokens, " (max_num_batched_tokens)"),
        max_num_batched_tokens=tokens,
        max_model_len=length,
    )


def model_spec(config: ModelConfig) -> ModelSpec:
    """What an engine's manifest says of the decoder."""
    experts, hidden = config.experts, config.hidden_size
    parameters, idle = sum(map(math.prod, expected_shapes(config).values())), 0
    if experts:
        idle = sum(experts.layers) * (experts.num_experts - experts.top_k) * 3 * hidden * experts.intermediate_size
    return ModelSpec(
        architecture=config.architecture,
        num_layers=config.num_layers,
        hidden_size=hidden,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_theta=config.rope.theta,
        rope_type=config.rope.type,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        num_experts=experts.num_experts if experts else 0,
        num_experts_per_token=experts.top_k if experts else 0,
        moe_intermediate_size=experts.intermediate_size if experts else 0,
        num_parameters=parameters,
        num_active_parameters=parameters - idle,
    )


def _producer() -> str:
    try:
        return f"qwenrt {version('qwenrt')}"
    except PackageNotFoundError:
        return "qwenrt, not installed"


@contextlib.contextmanager
def _disk_errors(out: str | os.PathLike[str]) -> Iterator[None]:
    """Explain in one line why the system did not take the engine's files."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"the disk is full: engine folder {os.fspath(out)} was not written; choose another disk"
            ) from None
        raise ConfigError(f"cannot write engine folder {os.fspath(out)}: {error}; choose another folder") from None
