"""Runs `qwenrt` as a user's shell does: a process with its own stdout, stderr and exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")} | {
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "PYTHONIOENCODING": "utf-8",
}

_BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
from qwenrt.tools.cli import main
main()
"""


def start(*arguments: str | Path | bytes, blocked: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a command line, with the modules named in `blocked` as if they were not installed."""
    program = ["-c", _BLOCKER.format(blocked=blocked)] if blocked else ["-m", "qwenrt.tools.cli"]
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def qwenrt(
    *arguments: str | Path | bytes, stdin: str | bytes = b"", blocked: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    """Run a command line to its end; returns exit status, stdout and stderr."""
    process = start(*arguments, blocked=blocked)
    stdout, stderr = process.communicate(stdin.encode() if isinstance(stdin, str) else stdin, timeout=300)
    return process.returncode, stdout.decode(), stderr.decode()
