"""The wheel on a machine without a compiler, and without PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_generates_where_there_is_no_compiler_and_no_torch(tiny_engine: Path, tmp_path: Path) -> None:
    def run(*command: str | Path, **environment: str) -> str:
        done = subprocess.run(command, env={**os.environ, **environment}, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("qwenrt-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    bin_dir = tmp_path / "venv" / "bin"
    run(bin_dir / "pip", "install", "-q", wheel)
    # Nothing but the virtual environment's programs can be found.
    bare = {"PATH": str(bin_dir), "PYTHONPATH": ""}
    assert "torch" not in run(bin_dir / "pip", "list", **bare)
    text = run(bin_dir / "qwenrt", "generate", tiny_engine, "hello", "--max-tokens", "4", "--json", **bare)
    assert '"finish_reason": "length"' in text
    assert "0.1.0" in run(bin_dir / "qwenrt", "--version", **bare)
