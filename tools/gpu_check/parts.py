"""The parts of a check: each is a process of its own with a time limit, so that none can stop or hide another.

A part's standard output is its result, one JSON object a line, written as soon as it is known: what a part had found before it
crashed or ran out of time counts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Row = dict[str, Any]
_LAST_LINES = 12


class Status(StrEnum):
    """How a part ended."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Part:
    """What to run, and for how many seconds at most; `missing` says what this machine lacks for it, if anything."""

    name: str
    command: Sequence[str]
    seconds: float
    missing: str | None = None


@dataclass(frozen=True)
class Result:
    """What came of a part."""

    name: str
    status: Status
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    error: str = ""


def emit(row: Row) -> None:
    """Hands a row of the part that this process is to the process that started it."""
    print(json.dumps(row), flush=True)


def run_part(part: Part, seconds_left: float, environment: Mapping[str, str] = os.environ) -> Result:
    """Runs a part to its end, to its own limit or to that of the whole check, whichever comes first."""
    if part.missing is not None:
        return Result(part.name, Status.SKIPPED, error=part.missing)
    limit = min(part.seconds, seconds_left)
    if limit <= 0:
        return Result(part.name, Status.SKIPPED, error="no time was left")
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            part.command, stdout=output, stderr=log, env=dict(environment), start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Its children too, whether it has ended or not: a compiler, a process under compute-sanitizer.
            _kill_group(process)
        output.seek(0)
        log.seek(0)
        rows = _rows(output.read())
        last = "\n".join(log.read().strip().splitlines()[-_LAST_LINES:])
    seconds = time.monotonic() - started
    if code is None:
        return Result(part.name, Status.TIMED_OUT, seconds, rows, f"stopped after {limit:.0f} s")
    if code != 0:
        return Result(part.name, Status.FAILED, seconds, rows, last or f"exit code {code}")
    return Result(part.name, Status.PASSED, seconds, rows)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _rows(output: str) -> list[Row]:
    """The lines that are JSON objects; a tool that runs the part may have written others between them."""
    rows = []
    for line in output.splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
