"""The parent's side of `worker`: starts it, follows what it tells, and explains how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from qwenrt.plugins import ConfigError
from qwenrt.plugins.tensorrt_module import library_with_unversioned_name

from .worker import Request

_STDERR_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """How a build ended: facts about the plan, and the warnings that TensorRT logged."""

    tensorrt_version: str
    activation_bytes: int
    warnings: tuple[str, ...]


def run_build(request: Request, progress: Callable[[str, int, int], None]) -> BuildResult:
    """Have a child process build the plan; `progress` takes phase, done and total.

    The plan is at `request.plan` when this returns. Raises ConfigError with TensorRT's first error, or with the signal that ended
    the child and the last that it said.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qwenrt-")))
        stderr = stack.enter_context((folder / "stderr").open("w+b"))
        worker = stack.enter_context(_started(request, folder, stderr))
        assert worker.stdin is not None and worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(json.dumps(dataclasses.asdict(request)) + "\n")
            worker.stdin.close()
        warnings: dict[str, None] = {}
        errors: dict[str, None] = {}
        for line in worker.stdout:
            told = json.loads(line)
            if "phase" in told:
                progress(told["phase"], told["done"], told["total"])
            elif "log" in told:
                (errors if told["error"] else warnings).setdefault(told["log"])
            elif "failed" in told:
                raise ConfigError(told["failed"])
            else:
                return BuildResult(**told["built"], warnings=tuple(warnings))
        raise ConfigError(_how_it_ended(worker.wait(), list(errors), stderr))


@contextlib.contextmanager
def _started(request: Request, folder: Path, stderr: BinaryIO) -> Iterator[subprocess.Popen[str]]:
    """The child; it is killed if it lives when the block ends."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if (shared := library_with_unversioned_name(request.target)) is not None:
        (folder / shared.name.partition(".so")[0]).with_suffix(".so").symlink_to(shared)
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH"))))
    command = [sys.executable, "-m", f"{__package__}.worker"]
    worker = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8"
    )
    with worker:
        try:
            yield worker
        finally:
            worker.kill()


def _how_it_ended(status: int, errors: list[str], stderr: BinaryIO) -> str:
    """For a child that ended without a word."""
    stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, stderr.tell() - _STDERR_BYTES))
    lines = stderr.read().decode("utf-8", "replace").strip().splitlines()
    last = errors[:1] or lines[-1:]
    how = f"it was ended by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"
    return f"{how}: {last[0]}" if last else how
