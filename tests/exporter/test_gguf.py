"""GGUF files: tokens equal to transformers on what their tensors stand for, tokenizers rebuilt, and files from an enemy."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from qwenrt.exporter import export
from qwenrt.exporter.dequantize import GgufWeight
from qwenrt.exporter.gguf_file import BLOCK_TYPES, GgufFile
from qwenrt.exporter.gguf_model import GgufModel
from qwenrt.exporter.gguf_tokenizer import tokenizer_files
from qwenrt.exporter.quantization_config import Quantization
from qwenrt.exporter.quantized_weight import Part
from qwenrt.exporter.safetensors_file import TensorInfo
from qwenrt.exporter.source import source_of
from qwenrt.plugins import ConfigError
from qwenrt.runtime import LLM
from tests.checkpoints import write_checkpoint
from tests.gguf_files import MIXES, tokenizer_pairs, write_gguf
from tests.runtime.test_families import MOE, check_tokens

QWEN3_TOKENIZER = Path(__file__).parents[3] / "shared" / "qwen3-tokenizer"
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""Q4_K and Q6_K have blocks of 256 columns."""
TEXTS = (
    "Hello, world!  It's 12345 o'clock.\n\n\tdef f(x):\r\n    return x**2\n",
    "Ünïcödé e\u0301 日本語 🤗🏳️‍🌈 \u200b",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think> <tool_call>",
    "   \n \n  x",
)


@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix != "F16"])
def test_greedy_tokens_equal_transformers(mix: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=2, num_hidden_layers=2, **WIDE)
    path = write_gguf(tmp_path / "model.gguf", checkpoint, tmp_path / "reference", mix)
    check_tokens(path, tmp_path / "engine", tmp_path / "reference")


@pytest.mark.parametrize(
    "family",
    [
        {"family": "qwen2", "tie_word_embeddings": False, "head_dim": 16},
        {**MOE, "tie_word_embeddings": False},
    ],
    ids=["qwen2", "moe"],
)
def test_other_families(family: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=2, num_hidden_layers=2, **family)
    path = write_gguf(tmp_path / "model.gguf", checkpoint, tmp_path / "reference", "Q8_0")
    check_tokens(path, tmp_path / "engine", tmp_path / "reference")


def test_yarn_is_read_from_the_metadata(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1, rope_parameters=rope)
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    pairs = {f"qwen3.rope.scaling.{name}": value for name, value in scaling.items()}
    path = write_gguf(tmp_path / "model.gguf", checkpoint, tmp_path / "reference", "F16", **pairs)
    check_tokens(path, tmp_path / "engine", tmp_path / "reference")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    checkpoint = write_checkpoint(folder / "checkpoint", num_hidden_layers=1)
    return write_gguf(folder / "model.gguf", checkpoint, folder / "reference", "Q8_0")


def test_the_engine_has_tokenizer_template_and_end_of_text(small: Path, tmp_path: Path) -> None:
    engine = export(small, tmp_path / "engine", weights="int8")
    config = json.loads((small.parent / "checkpoint" / "generation_config.json").read_text())
    assert set(engine.manifest.eos_token_ids) == set(config["eos_token_id"])
    llm = LLM(engine.path)
    rendered = llm.render([{"role": "user", "content": "hi"}], enable_thinking=False)
    assert rendered.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert llm.engine.tokenizer.encode("<|im_end|>") == [config["eos_token_id"][0]]


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_block_type_decodes_as_gguf_does(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 60, (48, 2048 // block * size)).astype(np.uint8)
    info = TensorInfo(tmp_path, 0, data.nbytes, kind, (48, 2048))
    weight = GgufWeight("x", {"weight": Part(info, lambda: data)}, (48, 2048), Quantization(method="gguf", bits=0))
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert weight.decode().tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.slow
@pytest.mark.skipif(not QWEN3_TOKENIZER.exists(), reason="needs ../shared/qwen3-tokenizer")
def test_the_tokenizer_of_qwen3_comes_back(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1, vocab_size=151936, hidden_size=8)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QWEN3_TOKENIZER / name, checkpoint / name)
    (checkpoint / "chat_template.jinja").unlink()
    source = source_of(write_gguf(tmp_path / "model.gguf", checkpoint, tmp_path / "reference", "F16"))
    files = source.texts()
    ours, theirs = (
        json.loads(text) for text in (files["tokenizer.json"], (QWEN3_TOKENIZER / "tokenizer.json").read_text())
    )
    assert {key: value for key, value in ours.items() if key != "added_tokens"} == {
        key: value for key, value in theirs.items() if key != "added_tokens"
    }
    assert {(e["id"], e["content"], e["special"]) for e in ours["added_tokens"]} == {
        (e["id"], e["content"], e["special"]) for e in theirs["added_tokens"]
    }
    one, other = Tokenizer.from_str(json.dumps(ours)), Tokenizer.from_str(json.dumps(theirs))
    assert [one.encode(text).ids for text in TEXTS] == [other.encode(text).ids for text in TEXTS]
    template = json.loads((QWEN3_TOKENIZER / "tokenizer_config.json").read_text())["chat_template"]
    assert files["chat_template.jinja"].decode() == template
    assert source.config.eos_token_ids == (151645, 151643)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "llama"}, 'general.architecture is "llama", of GGUF files qwen2, qwen3, qwen3moe'),
        ({"qwen3.block_count": 0}, "qwen3.block_count is 0, must be"),
        ({"qwen3.embedding_length": 2**31}, "qwen3.embedding_length is 2147483648"),
        ({"qwen3.attention.value_length": 16}, "value_length is 16, must be the key_length, 32"),
        ({"qwen3.attention.sliding_window": 128}, "sliding_window is 128, not supported"),
        ({"qwen3.rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor is not supported"),
        ({"qwen3.rope.scaling.type": "longrope"}, "longrope"),
        ({"qwen3.context_length": None}, "qwen3.context_length is missing"),
        ({"qwen3.feed_forward_length": 96}, r"gate_proj.weight has shape \[128, 64\].* \[96, 64\]"),
        ({"tokenizer.ggml.model": "llama"}, 'tokenizer.ggml.model is "llama", supported is gpt2'),
        ({"tokenizer.ggml.pre": "llama-bpe"}, 'tokenizer.ggml.pre is "llama-bpe"'),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "has a token twice"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or no list"),
        ({"tokenizer.ggml.merges": ["Ġ nothing"]}, "model.gguf: tokenizer.json is no tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
        ({"tokenizer.ggml.add_bos_token": True}, "add_bos_token is true"),
        ({"tokenizer.chat_template": "{% for"}, "chat_template"),
    ],
)
def test_metadata_that_is_not_supported_is_refused_by_name(
    change: dict[str, Any], message: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = GgufFile.__init__

    def changed(self: GgufFile, path: Path) -> None:
        original(self, path)
        for name, value in change.items():
            if value is None:
                del self.metadata[name]
            else:
                self.metadata[name] = np.array(value) if name.endswith("tokens") and value == [1, 2] else value

    monkeypatch.setattr(GgufFile, "__init__", changed)
    with pytest.raises(ConfigError, match=message) as caught:
        export(small, tmp_path / "engine")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def load(path: Path) -> None:
    """Everything that an export reads of the file."""
    model = GgufModel(path)
    checkpoint = model.checkpoint()
    checkpoint.check(model.config)
    model.texts()
    for name in checkpoint.tensors:
        checkpoint.read(name)


def refused(path: Path, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=message) as caught:
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def header(pairs: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] = (0, 1), version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + pairs + tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has 0 bytes"),
        (b"GGUF" + bytes(19), "it has 23 bytes"),
        (b"\x93NUMPY" + bytes(30), "is no GGUF file"),
        (header(version=1), "GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648"),
        (header(counts=(0, 1 << 63)), "is truncated"),
        (header(text("a") + struct.pack("<IIQ", 9, 4, 1 << 61)), "is truncated"),
        (header(text("a") + struct.pack("<IIQ", 9, 8, 1 << 62)), "is truncated"),
        (header(text("a") + struct.pack("<IIQ", 9, 9, 1)), "an array of type 9"),
        (header(struct.pack("<Q", 1 << 60)), "is truncated"),
        (header(text("a") + struct.pack("<I", 77)), "a value of type 77"),
        (header(struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 7, 1)), "not UTF-8"),
        (header(2 * (text("a") + struct.pack("<IB", 7, 1)), counts=(0, 2)), 'the key "a" twice'),
        (header(text("general.alignment") + struct.pack("<II", 4, 3)), "general.alignment is 3"),
        (header(b"", tensor("x", (32,), 0, 0), (1, 0)), "does not fit the file"),
        (header(b"", tensor("x", (32,), 99, 0) + bytes(999), (1, 0)), "ggml type 99, supported are F32"),
        (header(b"", tensor("x", (33,), 8, 0) + bytes(999), (1, 0)), "does not fit"),
        (header(b"", tensor("x", (1 << 39, 1 << 39), 0, 0) + bytes(999), (1, 0)), "does not fit"),
        (header(b"", tensor("x", (0,), 0, 0) + bytes(999), (1, 0)), "has the shape"),
        (header(b"", tensor("x", (1,) * 5, 0, 0) + bytes(999), (1, 0)), "has 5 dimensions"),
        (header(b"", tensor("x", (32,), 0, 7) + bytes(999), (1, 0)), "does not fit"),
        (header(b"", tensor("x", (32,), 0, 0) + tensor("y", (32,), 0, 32) + bytes(999), (2, 0)), "lies over another"),
        (header(b"", 2 * tensor("x", (32,), 0, 0) + bytes(999), (2, 0)), "is there twice"),
    ],
)
def test_a_hostile_header_is_one_error_in_little_memory(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    refused(path, message)


def test_a_truncated_file_and_a_missing_or_unknown_tensor(small: Path, tmp_path: Path) -> None:
    path, data = tmp_path / "model.gguf", small.read_bytes()
    path.write_bytes(data[:-100])
    refused(path, "does not fit the file")
    path.write_bytes(data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_x.weight"))
    refused(path, "lacks .*k_proj")
    path.write_bytes(data.replace(b"output_norm.weight", b"extra_norm1.weight"[:18]))
    refused(path, "lacks")
    nan = bytearray(data)
    file = GgufFile(small)
    start = file.tensors["blk.0.attn_k.weight"].start
    nan[start : start + 2] = np.array(np.nan, np.float16).tobytes()
    path.write_bytes(nan)
    refused(path, "k_proj.* holds what is no finite number")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage(data: st.DataObject, small: Path, tmp_path: Path) -> None:
    damaged = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(damaged), 9000) - 8))
        value = data.draw(st.sampled_from([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]))
        width = data.draw(st.sampled_from([1, 4, 8]))
        damaged[place : place + width] = struct.pack("<Q", value)[:width]
    path = tmp_path / "model.gguf"
    path.write_bytes(damaged)
    try:
        load(path)
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_a_tokenizer_without_types_has_plain_tokens_only(small: Path) -> None:
    pairs = tokenizer_pairs(small.parent / "checkpoint")
    del pairs["tokenizer.ggml.token_type"]
    assert json.loads(tokenizer_files(pairs, "x")["tokenizer.json"])["added_tokens"] == []
