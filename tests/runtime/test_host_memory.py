"""Weights read into memory and mapped from the file; arrays of zeros."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qwenrt.runtime import LLM, ConfigError, SamplingParams
from qwenrt.runtime.backends import onnxruntime as backend
from qwenrt.runtime.backends.host_memory import read_safetensors, zeros


def test_the_tensors_of_a_file_come_as_they_are(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    saved = {
        "large": torch.randn(3000, 3001, generator=generator),
        "half": torch.randn(7, 5, generator=generator).half(),
        "brain": torch.randn(9, generator=generator).bfloat16(),
        "codes": torch.arange(-100, 100, dtype=torch.int8).reshape(2, 100),
        "nibbles": torch.arange(250, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
    }
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = read_safetensors(tmp_path / "model.safetensors", threads=2)
    assert read.keys() == saved.keys()
    for name, tensor in saved.items():
        dtype, values = read[name]
        if dtype == "BF16":
            tensor = tensor.view(torch.uint16)
        assert values.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(values, tensor.numpy())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 3,
        (2**63 - 1).to_bytes(8, "little") + b"{}",
        *(
            len(header).to_bytes(8, "little") + header + b"\x00" * 16
            for header in (
                b"[]",
                b"{",
                b'{"a": 1}',
                b'{"a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}}',
                b'{"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}',
                b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]}}',
                b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0.5, 16]}}',
                b'{"a": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}}',
                b'{"a": {"dtype": [], "shape": [4], "data_offsets": [0, 16]}}',
                b'{"a": {"dtype": "F32", "shape": [4]}}',
            )
        ),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is no safetensors file"):
        read_safetensors(tmp_path / "model.safetensors", threads=1)


def test_zeros_are_writable_and_zero() -> None:
    array = zeros((3, 2, 5), np.float16)
    assert array.dtype == np.float16
    assert not array.any()
    array[1] = 7
    assert array.sum() == 70
    assert zeros((0, 4), np.float32).shape == (0, 4)


def test_memory_is_taken_when_it_is_used_or_at_once() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size, before = 1 << 26, resident()
    later = zeros((size,), np.uint8)
    assert resident() - before < size / 2
    now = zeros((size,), np.uint8, populate=True)
    assert resident() - before > size * 0.9
    assert not now.any() and later.shape == now.shape


@pytest.mark.parametrize(
    ("options", "free", "at_once"),
    [({}, 1 << 40, False), ({"num_kv_blocks": 40}, 1 << 40, True), ({"num_kv_blocks": 40}, 1 << 20, False)],
)
def test_a_pool_that_was_asked_for_is_there_when_the_engine_is_loaded_if_there_is_plenty_of_memory(
    options: dict[str, int], free: int, at_once: bool, tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def watched(shape: tuple[int, ...], dtype: Any, *, populate: bool) -> Any:
        asked.append(populate)
        return zeros(shape, dtype, populate=populate)

    monkeypatch.setattr(backend, "zeros", watched)
    monkeypatch.setattr(backend, "available_memory", lambda: free)
    LLM(tiny_engine, **options)
    assert asked == [at_once] * 4


def test_more_than_the_machine_has_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        zeros((1 << 50,), np.float32)


def test_weights_that_are_large_for_the_machine_are_mapped_and_give_the_same_tokens(
    demo_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers, read = [], []

    def recorded(path: Path, *, threads: int) -> object:
        read.append(path)
        return read_safetensors(path, threads=threads)

    monkeypatch.setattr(backend, "read_safetensors", recorded)
    for free in (1 << 40, json.loads((demo_engine / "engine.json").read_text())["files"]["model.safetensors"]["size"]):
        monkeypatch.setattr(backend, "available_memory", lambda free=free: free)
        answers.append(LLM(demo_engine, num_kv_blocks=16, threads=1).generate("2+2=", params)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert len(read) == 1
