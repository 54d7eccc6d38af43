"""Running a command line inside the test process, which is faster than `command.qwenrt`, and servers for those that need one."""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwenrt.tools import cli

from .openai_server import Respond, Serve, Server


@pytest.fixture(scope="session")
def nan_engine(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine whose last norm is NaN, so that no token can be sampled."""
    path = tmp_path_factory.mktemp("nan") / "engine"
    shutil.copytree(tiny_engine, path)
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    start, end = json.loads(data[8:header])["model.norm.weight"]["data_offsets"]
    data[header + start : header + end] = struct.pack("<f", math.nan) * ((end - start) // 4)
    weights.write_bytes(data)
    manifest = json.loads((path / "engine.json").read_text())
    manifest["files"][weights.name]["sha256"] = hashlib.sha256(data).hexdigest()
    (path / "engine.json").write_text(json.dumps(manifest))
    return path


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


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(respond: Respond) -> Server:
        servers.append(Server(respond))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
