"""An engine with small blocks, and `qwenrt compare` run inside the test's process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qwenrt.exporter import export

from ..conftest import Here


@dataclass(frozen=True)
class Outcome:
    """What a comparison came to: exit status, what it printed, and the JSON of its only reference."""

    status: int
    stdout: str
    stderr: str
    report: Any

    @property
    def verdict(self) -> str:
        """The last line."""
        return self.stdout.splitlines()[-1]

    @property
    def failed(self) -> list[Any]:
        """The checks that failed."""
        return [check for check in self.report["checks"] if not check["passed"]]

    @property
    def bad_parts(self) -> list[str]:
        """The parts of the graph that are out of tolerance by themselves, in the graph's order."""
        return list(dict.fromkeys(check["part"] for check in self.failed if check["part"]))


Compare = Callable[..., Outcome]


@pytest.fixture(scope="session")
def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with blocks of 8, so that batches have many edges."""
    out = tmp_path_factory.mktemp("compare") / "engine"
    export(tiny_checkpoint, out, block_size=8)
    return out


@pytest.fixture
def compare(here: Here, tmp_path: Path) -> Compare:
    """Runs `qwenrt compare`."""

    def run(*arguments: str | Path) -> Outcome:
        file = tmp_path / "result.json"
        status, stdout, stderr = here("compare", *arguments, "--json", file)
        report = json.loads(file.read_text())["comparisons"][0] if file.exists() else None
        file.unlink(missing_ok=True)
        return Outcome(status, stdout, stderr, report)

    return run
