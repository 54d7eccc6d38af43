"""`qwenrt make-checkpoint`: a random-weight Qwen3 checkpoint of any shape, laid out as Hugging Face transformers saves one."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

from .byte_tokenizer import special_ids, tokenizer_files
from .options import BYTE_SIZE
from .progress import bytes_bar

DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
"""Per dtype: its name in safetensors and its size in bytes."""

WEIGHT_STD = 0.02
_TRANSFORMERS_VERSION = "5.24.0"
_CHUNK = 1 << 20
_DISK_SLACK = 64 << 20


_RANGES: dict[str, tuple[float, float]] = {
    "num_layers": (1, 1024),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 22),
    "num_heads": (1, 1 << 16),
    "num_kv_heads": (1, 1 << 16),
    "head_dim": (1, 1 << 13),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (1, 1 << 22),
    "rope_theta": (1.001, 1e18),
    "rms_norm_eps": (1e-30, 1.0),
}
"""What `qwenrt export` takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The hyper-parameters that fix a dense Qwen3's tensors; sizes are in elements."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    max_position_embeddings: int = 40960
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}, must be {low:.10g} to {high:.10g}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads is {self.num_heads}, must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, must be even: RoPE rotates pairs")

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, in the order in which transformers' modules hold them."""
        hidden, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * dim, self.num_kv_heads * dim
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            layer = f"model.layers.{i}."
            for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
                out[f"{layer}self_attn.{name}_proj.weight"] = (rows, columns)
                if self.attention_bias:
                    out[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
            out[layer + "self_attn.q_norm.weight"] = (dim,)
            out[layer + "self_attn.k_norm.weight"] = (dim,)
            out[layer + "mlp.gate_proj.weight"] = (inner, hidden)
            out[layer + "mlp.up_proj.weight"] = (inner, hidden)
            out[layer + "mlp.down_proj.weight"] = (hidden, inner)
            out[layer + "input_layernorm.weight"] = (hidden,)
            out[layer + "post_attention_layernorm.weight"] = (hidden,)
        out["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            out["lm_head.weight"] = (self.vocab_size, hidden)
        return out

    def config(self, *, dtype: str, bos_token_id: int, eos_token_id: int) -> dict[str, Any]:
        """The config.json that transformers 5 writes for this shape."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "bos_token_id": bos_token_id,
            "dtype": dtype,
            "eos_token_id": eos_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": WEIGHT_STD,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"] * self.num_layers,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "pad_token_id": None,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "sliding_window": None,
            "tie_word_embeddings": self.tie_word_embeddings,
            "transformers_version": _TRANSFORMERS_VERSION,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


SHAPES = {
    "0.6B": Shape(num_layers=28, hidden_size=1024, intermediate_size=3072, num_heads=16, tie_word_embeddings=True),
    "1.7B": Shape(num_layers=28, hidden_size=2048, intermediate_size=6144, num_heads=16, tie_word_embeddings=True),
    "4B": Shape(num_layers=36, hidden_size=2560, intermediate_size=9728, num_heads=32, tie_word_embeddings=True),
    "8B": Shape(num_layers=36, hidden_size=4096, intermediate_size=12288, num_heads=32),
    "14B": Shape(num_layers=40, hidden_size=5120, intermediate_size=17408, num_heads=40),
    "32B": Shape(num_layers=64, hidden_size=5120, intermediate_size=25600, num_heads=64),
}
"""The published dense Qwen3 shapes."""


def make_checkpoint(
    out: str | os.PathLike[str],
    shape: Shape,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    tokenizer: str | os.PathLike[str] | None = None,
    max_shard_size: int = 5_000_000_000,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a checkpoint folder; a tensor's values depend on seed, its name and its size alone, before rounding to dtype.

    Projections, embeddings and biases are normal with standard deviation 0.02; norm weights are uniform in [0.5, 1.5), so
    that a norm that is skipped or swapped shows. `tokenizer` is a folder whose tokenizer files are copied; without one,
    `tokenizer_files` are written. `progress` is called with bytes written and bytes in all. Memory stays below about 0.2
    GiB at any size. Raises ConfigError when `out` exists, the disk is too small, or the tokenizer does not fit.
    """
    target = Path(os.path.abspath(out))
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
    if seed < 0:
        raise ConfigError(f"seed is {seed}, must be 0 or more")
    files, bos, eos = _tokenizer(shape, tokenizer)
    files["config.json"] = _json(shape.config(dtype=dtype, bos_token_id=bos, eos_token_id=eos))
    files["generation_config.json"] = _json(_generation_config(bos, eos))
    tensors = shape.tensors()
    shards = _plan_shards(tensors, DTYPES[dtype][1], max_shard_size)
    total = sum(map(math.prod, tensors.values())) * DTYPES[dtype][1]
    if len(shards) > 1:
        index = {
            "metadata": {"total_parameters": total // DTYPES[dtype][1], "total_size": total},
            "weight_map": dict(sorted((n, f) for f, ns in shards.items() for n in ns)),
        }
        files["model.safetensors.index.json"] = _json(index)
    with _new_folder(target, total) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        done = 0
        for file, names in shards.items():
            with (folder / file).open("wb") as stream:
                for written in _write_shard(stream, {name: tensors[name] for name in names}, dtype, seed):
                    done += written
                    if progress:
                        progress(done, total)
                stream.flush()
                os.fsync(stream.fileno())
    return target


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _generation_config(bos: int, eos: int) -> dict[str, Any]:
    return {
        "bos_token_id": bos,
        "do_sample": True,
        "eos_token_id": [eos, bos] if eos != bos else eos,
        "pad_token_id": bos,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": _TRANSFORMERS_VERSION,
    }


def _tokenizer(shape: Shape, folder: str | os.PathLike[str] | None) -> tuple[dict[str, str | bytes], int, int]:
    """Tokenizer files by name, and the ids of <|endoftext|> and of the end of a turn."""
    if folder is None:
        ids = special_ids(shape.vocab_size)
        return dict(tokenizer_files(shape.vocab_size)), ids["<|endoftext|>"], ids["<|im_end|>"]
    files: dict[str, str | bytes] = {}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt"):
        path = Path(folder, name)
        if path.is_file():
            files[name] = path.read_bytes()
        elif name.startswith("tokenizer"):
            raise ConfigError(f"tokenizer folder {folder} has no {name}")
    try:
        tokenizer, config = (json.loads(files[name]) for name in ("tokenizer.json", "tokenizer_config.json"))
        ids = dict(tokenizer["model"]["vocab"]) | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        eos_token = config["eos_token"]
        eos = ids[eos_token["content"] if isinstance(eos_token, dict) else eos_token]
        largest = max(ids.values())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"tokenizer folder {folder} cannot be read ({type(error).__name__}: {error})") from None
    if largest >= shape.vocab_size:
        raise ConfigError(f"the tokenizer in {folder} has ids up to {largest}, vocab_size is {shape.vocab_size}")
    return files, ids.get("<|endoftext|>", eos), eos


def _plan_shards(tensors: dict[str, tuple[int, ...]], item: int, limit: int) -> dict[str, list[str]]:
    """Which tensors go into which file, filled in order as transformers does; a tensor above the limit gets its own file."""
    shards: list[list[str]] = []
    current: list[str] = []
    size = 0
    for name, shape in tensors.items():
        nbytes = math.prod(shape) * item
        if nbytes > limit:
            shards.append([name])
            continue
        if size + nbytes > limit:
            shards.append(current)
            current, size = [], 0
        current.append(name)
        size += nbytes
    if current:
        shards.append(current)
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}


@contextlib.contextmanager
def _new_folder(target: Path, nbytes: int) -> Iterator[Path]:
    """A hidden sibling of `target` that gets its name when the block ends; one left by a killed process is replaced."""
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists; choose another name or remove it")
    partial = target.parent / f".{target.name}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; choose a folder that you can write") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is writing {target}; wait for it or choose another name") from None
        try:
            for leftover in partial.iterdir():
                leftover.unlink()
            free = shutil.disk_usage(partial).free
            if free < nbytes + _DISK_SLACK:
                needed = (nbytes + _DISK_SLACK) / 1e9
                raise ConfigError(f"{target} needs {needed:.1f} GB, {free / 1e9:.1f} GB are free; choose another disk")
            yield partial
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(lock)


def _write_shard(stream: BinaryIO, tensors: dict[str, tuple[int, ...]], dtype: str, seed: int) -> Iterator[int]:
    """Write one file as https://huggingface.co/docs/safetensors has it, tensors by name; yields bytes of data as they go out."""
    code, item = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in sorted(tensors.items()):
        end = offset + math.prod(shape) * item
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    chunks = (
        (name, start, min(_CHUNK, size - start))
        for name, size in ((name, math.prod(shape)) for name, shape in sorted(tensors.items()))
        for start in range(0, size, _CHUNK)
    )
    workers = min(8, os.cpu_count() or 1)
    pending: deque[Future[npt.NDArray[Any]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for chunk in chunks:
            pending.append(pool.submit(_values, *chunk, dtype, seed))
            if len(pending) > 2 * workers:
                yield stream.write(pending.popleft().result().data)
        for future in pending:
            yield stream.write(future.result().data)


def _values(name: str, start: int, count: int, dtype: str, seed: int) -> npt.NDArray[Any]:
    """Elements [start, start + count) of a tensor, flat; bfloat16 as its bits in uint16, rounded to nearest even."""
    sequence = np.random.SeedSequence(seed, spawn_key=(zlib.crc32(name.encode()), start // _CHUNK))
    generator = np.random.Generator(np.random.SFC64(sequence))
    if name.endswith("norm.weight"):
        values = generator.random(count, dtype=np.float32) + np.float32(0.5)
    else:
        values = generator.standard_normal(count, dtype=np.float32) * np.float32(WEIGHT_STD)
    if dtype != "bfloat16":
        return values.astype(dtype, copy=False)
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


@click.command()
@click.argument("shape", type=click.Choice(list(SHAPES), case_sensitive=False), metavar="SHAPE")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The same seed gives the same weights."
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", show_default=True)
@click.option("--layers", "num_layers", type=int, help="Number of decoder layers.")
@click.option("--hidden-size", type=int)
@click.option("--intermediate-size", type=int)
@click.option("--num-heads", type=int, help="Query heads.")
@click.option("--num-kv-heads", type=int, help="Key/value heads.")
@click.option("--head-dim", type=int)
@click.option("--vocab-size", type=int)
@click.option("--max-position-embeddings", type=int)
@click.option("--rope-theta", type=float)
@click.option("--rms-norm-eps", type=float)
@click.option("--tie-word-embeddings/--no-tie-word-embeddings", default=None, help="Whether the head is the embedding.")
@click.option("--attention-bias/--no-attention-bias", default=None, help="Biases on the attention projections.")
@click.option("--tokenizer", type=click.Path(exists=True, file_okay=False), help="Folder to copy a tokenizer from.")
@click.option("--max-shard-size", type=BYTE_SIZE, default="5GB", show_default=True, help="Largest weight file.")
def command(
    shape: str,
    out: Path,
    seed: int,
    dtype: str,
    tokenizer: str | None,
    max_shard_size: int,
    **overrides: Any,
) -> None:
    """Write a random-weight Qwen3 checkpoint, for benchmarks and tests.

    SHAPE is 0.6B, 1.7B, 4B, 8B, 14B or 32B; every hyper-parameter can be overridden. OUT must not exist. Prints the folder.

    \b
    Examples:
      qwenrt make-checkpoint 0.6B ckpt/random-0.6b
      qwenrt make-checkpoint 8B ckpt/random-8b --seed 1 --tokenizer ckpt/Qwen3-8B
      qwenrt make-checkpoint 0.6B ckpt/tiny --layers 2 --hidden-size 64 --intermediate-size 128 \\
        --num-heads 4 --num-kv-heads 2 --head-dim 32 --vocab-size 320
    """
    chosen = {name: value for name, value in overrides.items() if value is not None}
    try:
        spec = dataclasses.replace(SHAPES[shape], **chosen)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    with bytes_bar(f"writing {out.name}") as progress:
        make_checkpoint(
            out, spec, seed=seed, dtype=dtype, tokenizer=tokenizer, max_shard_size=max_shard_size, progress=progress
        )
    click.echo(out)
