"""The library in processes with and without TensorRT: who registers the plugin, and where its errors go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from .build import REPOSITORY, build_host, build_plugin, missing

# Loads the plugin into a TensorRT that says it is of the version, lets it fail with and without a logger, and tells the outcome.
CHILD = """
import ctypes, json, sys
from pathlib import Path
from tests.plugins.tensorrt.binding import Host

host = Host(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
told = {"on_load": host.registered_on_load}
assert host.create({}) is None
told["after_get_creators"] = host.num_registered
told["logged"] = host.messages()
host.plugin.setLoggerFinder(ctypes.c_void_p(host.library.host_logger_finder()))
host.create({})
told["by_finder"] = host.messages()
host.library.host_set_logger(0)
host.create({})
told["without_logger"] = [line for line in host.messages() if "asked" not in line]
print(json.dumps(told))
"""
LINE = 'PagedAttention: node "node": attribute num_heads is missing'


def run(*command: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "plugins")])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


def load_into(version: int) -> tuple[dict[str, Any], list[str]]:
    """What the child tells, and the lines that it wrote to stderr."""
    if reason := missing():
        pytest.skip(reason)
    done = run("-c", CHILD, str(build_host()), str(build_plugin()), str(version))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.splitlines()


@pytest.mark.parametrize("version", [10, 11, 1], ids=["TensorRT 10", "TensorRT 11", "TensorRT for RTX 1.7"])
def test_registers_once_and_logs_to_the_host(version: int) -> None:
    told, stderr = load_into(version)
    assert told["on_load"] == 2
    assert told["after_get_creators"] == 0, "TensorRT registers what getCreators gives"
    assert told["logged"] == [f"1 {LINE}"]
    assert told["by_finder"] == ["4 asked for the logger", f"1 {LINE}"]
    assert told["without_logger"] == []
    assert stderr == [LINE]


def test_leaves_a_registry_that_it_does_not_know_alone() -> None:
    told, stderr = load_into(9)
    assert told["on_load"] == 0
    assert told["logged"] == []
    assert stderr == [LINE] * 3


def test_loads_where_there_is_no_tensorrt() -> None:
    if reason := missing():
        pytest.skip(reason)
    code = "import ctypes, sys; n = ctypes.c_int32(); ctypes.CDLL(sys.argv[1]).getCreators(ctypes.byref(n)); print(n.value)"
    done = run("-c", code, str(build_plugin()))
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_shows_nothing_but_its_entry_points() -> None:
    if reason := missing():
        pytest.skip(reason)
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(build_plugin())], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in listing.splitlines() if line.split()[-2] == "T"}
    assert names == {"getCreators", "setLoggerFinder", "cudaGetErrorName"}
