"""The random checkpoint: its layout is transformers' own, its size and speed are bounded, a failure leaves nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from qwenrt.plugins import ConfigError
from qwenrt.runtime.text.chat_template import ChatTemplate
from qwenrt.runtime.text.tokenizer import Tokenizer
from qwenrt.tools.byte_tokenizer import SPECIAL_TOKENS, tokenizer_files
from qwenrt.tools.make_checkpoint import SHAPES, Shape, make_checkpoint

TINY = Shape(
    num_layers=3,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=320,
    max_position_embeddings=256,
)
VARIANTS = {
    "untied": TINY,
    "tied": dataclasses.replace(TINY, tie_word_embeddings=True),
    "bias": dataclasses.replace(TINY, attention_bias=True),
    "theta": dataclasses.replace(TINY, rope_theta=10_000.0, rms_norm_eps=1e-5, num_layers=1),
}


def header(path: Path) -> Any:
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def tensors(folder: Path) -> dict[str, np.ndarray]:
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            out.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return out


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("0.6B", 596_049_920),
        ("1.7B", 1_720_574_976),
        ("4B", 4_022_468_096),
        ("8B", 8_190_735_360),
        ("14B", 14_768_307_200),
        ("32B", 32_762_123_264),
    ],
)
def test_named_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert sum(map(math.prod, SHAPES[name].tensors().values())) == parameters


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("limit", [60_000, 30_000, 5_000_000_000])
def test_layout_is_the_one_that_transformers_saves(tmp_path: Path, shape: Shape, limit: int) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ours = make_checkpoint(tmp_path / "ours", shape, max_shard_size=limit)
    config = transformers.AutoConfig.from_pretrained(ours)
    with torch.device("meta"):
        empty = transformers.Qwen3ForCausalLM(config)
    model = empty.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    model.save_pretrained(tmp_path / "theirs", max_shard_size=limit)
    theirs = tmp_path / "theirs"
    names = {path.name for path in theirs.iterdir()}
    assert names - {"generation_config.json"} <= {path.name for path in ours.iterdir()}
    for name in names:
        if name.endswith(".safetensors"):
            assert header(ours / name) == header(theirs / name)
    for name in names & {"config.json", "model.safetensors.index.json"}:
        mine, reference = (json.loads((folder / name).read_text()) for folder in (ours, theirs))
        if transformers.__version__ != mine.get("transformers_version", transformers.__version__):
            reference["transformers_version"] = mine["transformers_version"]
        assert mine == reference


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)
def test_transformers_loads_every_tensor(tmp_path: Path, shape: Shape) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = make_checkpoint(tmp_path / "checkpoint", shape, max_shard_size=50_000, dtype="float32")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, value in tensors(folder).items():
        assert np.array_equal(model.state_dict()[name].numpy(), value), name
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(9)[None]).logits).all()
    assert model.generation_config.eos_token_id == [296, 294]


def test_transformers_tokenizer_round_trips_any_text(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_checkpoint(tmp_path / "checkpoint", TINY)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>user\nSwift 社区 👋🏽 e\u0301\x00\r\n  x<|im_end|><think>"
    ids = tokenizer.encode(text)
    assert ids[:2] == [295, ord("u")]
    assert ids[-2:] == [296, 318]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|im_end|>"
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert tokenizer.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True, enable_thinking=False
    ) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nOne moment.", "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln <1>"}}},
    ]},
    {"role": "tool", "content": "7 °C"},
    {"role": "user", "content": "Thanks"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_the_runtime_reads_the_tokenizer_and_the_template_as_transformers_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_checkpoint(tmp_path / "checkpoint", TINY)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer, template = Tokenizer.from_dir(folder), ChatTemplate.from_dir(folder)
    for tools in (None, TOOLS):
        for thinking in (True, False):
            text = template.render(CONVERSATION, tools=tools, enable_thinking=thinking)
            assert text == theirs.apply_chat_template(
                CONVERSATION, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
            )
            assert "hm" not in text
            assert ('{"name": "weather"' in text) and ("Köln <1>" in text)
            assert text.endswith("assistant\n" if thinking else "</think>\n\n")
            assert ("# Tools" in text) == (tools is not None)
            assert tokenizer.encode(text) == theirs.encode(text)
    assert tokenizer.eos_token_id == theirs.eos_token_id
    ids = [*range(320), 0xE7, 65]
    assert tokenizer.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.parametrize("vocab_size", [282, 5000, 151936])
def test_every_id_of_the_tokenizer_decodes(vocab_size: int) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_files(vocab_size)["tokenizer.json"])
    first = tokenizer.token_to_id("<|endoftext|>")
    assert first == min(151643, vocab_size - len(SPECIAL_TOKENS))
    assert tokenizer.get_vocab_size() == first + len(SPECIAL_TOKENS)
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(first, first + len(SPECIAL_TOKENS)))
    assert (
        tokenizer.decode([*range(256, min(first, 300)), ord("a")])
        == "".join(f" {i}" for i in range(256, min(first, 300))) + "a"
    )


def test_a_copied_tokenizer_gives_the_special_ids(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", dataclasses.replace(TINY, vocab_size=300))
    copied = make_checkpoint(tmp_path / "copied", TINY, tokenizer=source)
    assert (copied / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((copied / "config.json").read_text())["eos_token_id"] == 276
    larger = make_checkpoint(tmp_path / "larger", TINY)
    with pytest.raises(ConfigError, match="ids up to 319, vocab_size is 300"):
        make_checkpoint(tmp_path / "no", dataclasses.replace(TINY, vocab_size=300), tokenizer=larger)
    (source / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer_config\.json"):
        make_checkpoint(tmp_path / "no", TINY, tokenizer=source)
    assert not (tmp_path / "no").exists()


def test_the_seed_fixes_every_value_whatever_the_shards_and_the_depth(tmp_path: Path) -> None:
    one = make_checkpoint(tmp_path / "one", TINY, seed=7)
    assert digests(one) == digests(make_checkpoint(tmp_path / "two", TINY, seed=7))
    float32 = tensors(make_checkpoint(tmp_path / "float32", TINY, seed=7, dtype="float32", max_shard_size=60_000))
    deeper = tensors(
        make_checkpoint(tmp_path / "deeper", dataclasses.replace(TINY, num_layers=4), seed=7, dtype="float32")
    )
    assert all(np.array_equal(value, deeper[name]) for name, value in float32.items())
    other = tensors(make_checkpoint(tmp_path / "other", TINY, seed=8, dtype="float32"))
    assert not any(np.array_equal(value, other[name]) for name, value in float32.items())


def test_values_are_drawn_as_documented_and_rounded_to_nearest(tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY, hidden_size=1000, vocab_size=3000, attention_bias=True)
    float32 = tensors(make_checkpoint(tmp_path / "float32", shape, dtype="float32"))
    for name, value in float32.items():
        if name.endswith("norm.weight"):
            assert 0.5 <= value.min() < 0.7 < 1.3 < value.max() < 1.5, name
        else:
            assert abs(value.std() - 0.02) < 0.005, name
    assert abs(float32["model.embed_tokens.weight"].std() - 0.02) < 2e-5
    rows = float32["model.embed_tokens.weight"]
    assert len({row.tobytes() for row in rows}) == len(rows)
    float16 = tensors(make_checkpoint(tmp_path / "float16", shape, dtype="float16"))
    assert all(np.array_equal(value.astype(np.float16), float16[name]) for name, value in float32.items())
    torch = pytest.importorskip("torch")
    bfloat16 = make_checkpoint(tmp_path / "bfloat16", shape)
    with safe_open(bfloat16 / "model.safetensors", "pt") as file:
        for name, value in float32.items():
            assert torch.equal(file.get_tensor(name), torch.from_numpy(value).to(torch.bfloat16)), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_layers": 10**9}, "num_layers is 1000000000, must be 1 to 1024"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5"),
        ({"rms_norm_eps": 2.0}, "rms_norm_eps is 2.0"),
        ({"num_heads": 3}, "num_heads is 3, must be a multiple of num_kv_heads"),
        ({"head_dim": 33}, "head_dim is 33, must be even"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"hidden_size": 2**31}, "hidden_size is 2147483648"),
    ],
)
def test_an_impossible_shape_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **changes)


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size is 281, .* needs 282"):
        make_checkpoint(tmp_path / "out", dataclasses.replace(TINY, vocab_size=281))
    assert not list(tmp_path.iterdir())


def test_what_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists; choose another name"):
        make_checkpoint(tmp_path / "out", TINY)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="exists; choose another name"):
        make_checkpoint(tmp_path / "link", TINY)


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(ConfigError, match=r"needs 1\.3 GB, 0\.0 GB are free"):
        make_checkpoint(tmp_path / "out", SHAPES["0.6B"])
    assert not list(tmp_path.iterdir())


def test_an_unwritable_parent_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*; choose a folder that you can write"):
        make_checkpoint(tmp_path / "file" / "out", TINY)


def start_large(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "qwenrt.tools.cli", "make-checkpoint", "0.6B", str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (out.parent / f".{out.name}.partial" / "model.safetensors").exists():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    ("signum", "status", "line"),
    [(signal.SIGINT, 130, "qwenrt: error: interrupted\n"), (signal.SIGTERM, 143, "qwenrt: error: terminated\n")],
)
def test_a_signal_leaves_nothing(tmp_path: Path, signum: int, status: int, line: str) -> None:
    process = start_large(tmp_path / "out")
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (status, "", line)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_no_checkpoint_and_is_replaced(tmp_path: Path) -> None:
    process = start_large(tmp_path / "out")
    with pytest.raises(ConfigError, match="another process is writing"):
        make_checkpoint(tmp_path / "out", TINY)
    process.kill()
    process.communicate(timeout=60)
    assert not (tmp_path / "out").exists()
    make_checkpoint(tmp_path / "out", TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from qwenrt.tools.make_checkpoint import SHAPES, make_checkpoint\n"
        "make_checkpoint(sys.argv[1], SHAPES['0.6B'])\n"
        "print([line for line in pathlib.Path('/proc/self/status').read_text().splitlines() if 'VmHWM' in line][0].split()[1])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    assert int(done.stdout) < 250 << 10
