"""Backend torch runs the graph of a folder for TensorRT over the CUDA kernels, here over the emulator instead of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from qwenrt.plugins import torch_cuda, torch_op
from qwenrt.runtime import LLM
from qwenrt.runtime.backends import torch as torch_backend
from tests.plugins.cuda.binding import EmulatedCuda
from tests.simt.build import build, missing

from .test_tokens import check, ids, tokens


def test_tokens_over_the_emulated_kernels(unbuilt: Path, cpu: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing():
        pytest.skip(reason)
    kernels = EmulatedCuda(build())

    def over_the_emulator(inputs: Mapping[str, Tensor], values: Mapping[str, float]) -> Tensor:
        return torch_cuda.launch(kernels, inputs, values, 0)

    monkeypatch.setattr(torch_backend, "check_device", lambda device, engine: None)
    monkeypatch.setattr(torch_op, "_check_types", lambda inputs: None)
    monkeypatch.setattr(torch_op, "_on_cpu", over_the_emulator)
    llm = LLM(unbuilt, backend="torch", device="cpu", num_kv_blocks=16, max_num_seqs=3, threads=1)
    prompts = [ids(length, length) for length in (1, 17, 40, 60)]
    check(tokens(llm, prompts), cpu, prompts)
