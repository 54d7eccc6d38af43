"""A part of gpu_check can fail, crash or hang, and all that it had found until then is kept."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from gpu_check.parts import Part, Status, run_part

EMIT = "from gpu_check.parts import emit; emit({'n': 1}); "


def python(code: str, seconds: float = 60) -> Part:
    return Part("part", [sys.executable, "-c", code], seconds)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def test_rows_are_what_was_emitted() -> None:
    result = run_part(python(EMIT + "print('======== a tool says'); print('[1]'); emit({'n': 2})"), 60)
    assert (result.status, result.rows, result.error) == (Status.PASSED, [{"n": 1}, {"n": 2}], "")


def test_a_failed_part_keeps_its_rows_and_says_why() -> None:
    result = run_part(python(EMIT + "raise ValueError('no such thing')"), 60)
    assert (result.status, result.rows) == (Status.FAILED, [{"n": 1}])
    assert result.error.endswith("ValueError: no such thing")


def test_a_crash_keeps_the_rows_before_it() -> None:
    result = run_part(python(EMIT + "import os; os.abort()"), 60)
    assert (result.status, result.rows) == (Status.FAILED, [{"n": 1}])
    assert result.error


@pytest.mark.parametrize(("own", "left"), [(1, 600), (600, 1)], ids=["its own limit", "the limit of the whole"])
def test_a_part_that_hangs_is_stopped_with_its_children_and_keeps_its_rows(own: int, left: int, tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"echo '{{\"n\": 1}}'; sleep 600 & echo $! >{child}; wait"
    result = run_part(Part("part", ["sh", "-c", script], own), left)
    assert (result.status, result.rows) == (Status.TIMED_OUT, [{"n": 1}])
    assert result.error == "stopped after 1 s"
    status = Path("/proc", child.read_text().strip(), "status")
    deadline = time.monotonic() + 60
    while status.exists() and "(zombie)" not in status.read_text():
        assert time.monotonic() < deadline, "the child runs on"
        time.sleep(0.05)


def test_without_time_or_tool_a_part_does_not_start(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"open({str(started)!r}, 'w')"
    late = run_part(python(code), 0)
    missing = run_part(Part("part", [sys.executable, "-c", code], 60, missing="a tool is not installed"), 60)
    assert [(r.status, r.error) for r in (late, missing)] == [
        (Status.SKIPPED, "no time was left"),
        (Status.SKIPPED, "a tool is not installed"),
    ]
    assert not started.exists()
