"""`qwenrt export --target tensorrt...` and `qwenrt build` as commands: what they print, and what they leave."""

from __future__ import annotations

import importlib.machinery
import json
import sys
from pathlib import Path

import pytest

from qwenrt.plugins import library
from qwenrt.runtime import EngineDir
from tests.plugins.tensorrt.build import build_plugin, missing
from tests.plugins.tensorrt.rtx import missing_rtx

from .conftest import Here

DEMO = Path(__file__).resolve().parents[2] / "tools" / "demo" / "checkpoint"


@pytest.fixture
def without_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with neither TensorRT, a GPU, nor the plugin."""

    class Blocker:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
            if name.split(".")[0] in ("tensorrt", "tensorrt_rtx"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return None

    monkeypatch.setattr(sys, "meta_path", [Blocker, *sys.meta_path])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(library, "_SOURCE_TREE", Path("/nowhere"))


def test_what_is_missing_is_told_in_one_line_and_the_rest_is_made(
    without_tensorrt: None, here: Here, tmp_path: Path
) -> None:
    out = tmp_path / "engine"
    status, stdout, stderr = here("export", DEMO, out, "--target", "tensorrt", "--max-model-len", "256")
    assert (status, stdout) == (1, "")
    assert stderr.count("\n") == 1
    assert f"qwenrt: error: engine folder {out} has all but its plan, which was not built: " in stderr
    assert "TensorRT is missing (pip install tensorrt)" in stderr
    assert "this machine has no " in stderr
    assert "libqwenrt_tensorrt.so is missing" in stderr
    assert stderr.endswith(f"run: qwenrt build {out}\n")
    EngineDir.open(out).verify()
    assert {path.name for path in out.iterdir()} >= {"model.onnx", "model.safetensors", "tokenizer.json"}
    status, stdout, stderr = here("build", out)
    assert (status, stdout) == (1, "")
    assert "TensorRT is missing" in stderr
    status, stdout, stderr = here("inspect", out)
    assert (status, stderr) == (0, "")
    assert f"none; build one with: qwenrt build {out}" in stdout


@pytest.fixture
def rtx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with TensorRT for RTX and the plugin."""
    if reason := missing() or missing_rtx():
        pytest.skip(reason)
    plugin = build_plugin()
    monkeypatch.setattr(library, "tensorrt_library", lambda: plugin)


def test_an_engine_for_one_generation_is_built_inspected_and_extended(rtx: None, here: Here, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    options = ("--target", "tensorrt-rtx", "--compute-capability", "8.9", "--dtype", "float16", "--weights", "int4")
    limits = ("--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    status, stdout, stderr = here("export", DEMO, out, *options, *limits)
    assert (status, stdout) == (0, f"{out}\n")
    assert stderr.splitlines()[0].startswith("model.sm89-rtx1.7.1.plan: ")
    status, stdout, _ = here("build", out, "--compute-capability", "12.0")
    assert (status, stdout) == (0, f"{out}\n")
    status, stdout, stderr = here("inspect", out, "--json")
    assert (status, stderr) == (0, "")
    report = json.loads(stdout)
    assert (report["dtype"], report["weights"], report["kv_dtype"]) == ("float16", "int4", "float16")
    assert [plan["compute_capability"] for plan in report["plans"]] == ["8.9", "12.0"]
    assert report["plans"][0]["profiles"][1]["num_tokens"] == {"min": 1, "opt": 64, "max": 64}
    status, stdout, _ = here("inspect", out)
    assert status == 0
    lines = [line.split() for line in stdout.splitlines()]
    (plan,) = (line for line in lines if line[:1] == ["model.sm120-rtx1.7.1.plan"] and "capability" in line)
    assert plan[1:8] == ["compute", "capability", "12.0", "1.7.1.116", "plan", "version", "1"]
    assert ["decode", "1", "to", "8", "(4)"] in [line[:5] for line in lines]
    assert ["prefill", "1", "to", "64", "(64)"] in [line[:5] for line in lines]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compute-capability", "9.0"), "'9.0' is not one of '8.0', '8.6', '8.9', '12.0'"),
        (("--compute-capability", ""), "is not one of"),
        (("--dtype", "int8"), "'int8' is not one of"),
    ],
)
def test_wrong_options_are_bad_usage(arguments: tuple[str, ...], message: str, here: Here, tmp_path: Path) -> None:
    status, stdout, stderr = here("export", DEMO, tmp_path / "engine", "--target", "tensorrt-rtx", *arguments)
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert not list(tmp_path.iterdir())
