"""`qwenrt export` as a command: what it prints, and that whatever stops it leaves nothing."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from qwenrt.runtime import EngineDir

from .command import qwenrt, start
from .conftest import Here


def test_options_reach_the_engine_and_the_folder_is_printed(tiny_checkpoint: Path, tmp_path: Path, here: Here) -> None:
    out = tmp_path / "engine"
    options = ("--block-size", "8", "--max-model-len", "64", "--max-num-seqs", "3", "--max-num-batched-tokens", "16")
    result = here("export", tiny_checkpoint, out, "--kv-dtype", "float16", "--weights", "float32", *options)
    assert result == (0, f"{out}\n", "")
    manifest = EngineDir.open(out).manifest
    assert (manifest.block_size, manifest.kv_dtype, manifest.weights) == (8, "float16", "float32")
    assert manifest.limits.max_model_len == 64
    assert manifest.limits.max_num_seqs == 3
    assert manifest.limits.max_num_batched_tokens == 16


def test_a_warning_is_one_line_and_no_failure(tiny_checkpoint: Path, tmp_path: Path, here: Here) -> None:
    out = tmp_path / "engine"
    status, stdout, stderr = here("export", tiny_checkpoint, out, "--max-model-len", "512")
    assert (status, stdout) == (0, f"{out}\n")
    assert stderr.startswith("qwenrt: warning: max_model_len is 512 and the model has 256 positions; ")
    assert stderr.count("\n") == 1


def test_an_engine_is_replaced_by_force_only(tiny_checkpoint: Path, tiny_engine: Path, here: Here) -> None:
    status, stdout, stderr = here("export", tiny_checkpoint, tiny_engine)
    assert (status, stdout) == (1, "")
    assert "--force" in stderr
    assert stderr.count("\n") == 1


def test_a_checkpoint_that_is_not_there_is_named_and_nothing_is_written(tmp_path: Path, here: Here) -> None:
    status, stdout, stderr = here("export", tmp_path / "nothing", tmp_path / "engine")
    assert (status, stdout) == (1, "")
    assert str(tmp_path / "nothing") in stderr
    assert stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["torch", "onnxscript"])
def test_a_missing_extra_is_named(tiny_checkpoint: Path, tmp_path: Path, package: str) -> None:
    status, stdout, stderr = qwenrt("export", tiny_checkpoint, tmp_path / "engine", blocked=(package,))
    assert (status, stdout) == (1, "")
    assert package in stderr
    assert "pip install 'qwenrt[export]'" in stderr
    assert stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("signum", "status", "line"),
    [
        (signal.SIGINT, 130, b"qwenrt: error: interrupted\n"),
        (signal.SIGTERM, 143, b"qwenrt: error: terminated\n"),
    ],
)
def test_a_signal_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path, signum: int, status: int, line: bytes) -> None:
    process = start("export", tiny_checkpoint, tmp_path / "engine")
    deadline = time.monotonic() + 120
    while not list(tmp_path.iterdir()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (status, b"", line)
    assert not list(tmp_path.iterdir())
