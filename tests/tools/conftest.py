"""Running a command line inside the test's own process, which is faster; `command.qwenrt` runs it as a process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qwenrt.tools import cli

Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs a command line; returns exit status, stdout and stderr."""
    monkeypatch.setattr(cli, "catch_signals", lambda: None)

    def run(*arguments: str | Path, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        status = cli.run([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run
