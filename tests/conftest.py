"""Fixtures that several folders share; what needs torch is imported when a test asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of a few thousand parameters."""
    from .checkpoints import write_checkpoint

    path = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_checkpoint(path)
    return path


@pytest.fixture(scope="session")
def tiny_engine(tiny_checkpoint: Path) -> Path:
    """That checkpoint, exported."""
    from qwenrt.exporter import export

    path = tiny_checkpoint.parent / "engine"
    export(tiny_checkpoint, path)
    return path


@pytest.fixture(scope="session")
def demo_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint, exported."""
    from qwenrt.exporter import export

    path = tmp_path_factory.mktemp("demo") / "engine"
    export(Path(__file__).parents[1] / "tools" / "demo" / "checkpoint", path)
    return path
