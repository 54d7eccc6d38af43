"""The commands of the comparison's README, run as they stand there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qwenrt.tools.compare
from qwenrt.exporter import export

DEMO = Path(__file__).parents[3] / "tools" / "demo" / "checkpoint"
README = (Path(qwenrt.tools.compare.__file__).parent / "README.md").read_text(encoding="utf-8")
_, _, _COPY = README.partition("## Commands to copy")
COMMANDS = [line.strip() for line in _COPY.splitlines() if line.startswith("    ")]
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README has it, and the commands' names on its path."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(DEMO, folder / "checkpoint")
    export(folder / "checkpoint", folder / "engine")
    (folder / "text.txt").write_text(TEXT)
    (folder / "bin").mkdir()
    polygraphy = "-c 'import sys; from polygraphy.tools import main; sys.exit(main())'"
    for name, arguments in {"qwenrt": "-m qwenrt.tools.cli", "polygraphy": polygraphy, "python": ""}.items():
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        script.chmod(0o755)
    return folder


@pytest.mark.slow
def test_the_commands_work_in_their_order(here: Path) -> None:
    assert len(COMMANDS) >= 11
    environment = os.environ | {
        "PATH": f"{here / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    for line in COMMANDS:
        done = subprocess.run(
            ["bash", "-c", line], cwd=here, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        if line.startswith("polygraphy run"):
            assert "PASSED" in done.stdout
            assert "Pass Rate: 100.00%" in done.stdout
    assert "<svg" in (here / "report.html").read_text(encoding="utf-8")
