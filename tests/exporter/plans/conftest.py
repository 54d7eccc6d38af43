"""TensorRT for RTX with the real plugin over emulated kernels.

A build asks the plugin for shapes, types and memory, and launches nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwenrt.exporter import export
from qwenrt.plugins import library
from tests.plugins.tensorrt.build import build_plugin, missing
from tests.plugins.tensorrt.rtx import missing_rtx

from .folders import DEMO


@pytest.fixture(scope="package", autouse=True)
def plugin() -> Iterator[Path]:
    if reason := missing() or missing_rtx():
        pytest.skip(reason)
    path = build_plugin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "tensorrt_library", lambda: path)
        yield path


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint for RTX GPUs of the two default generations."""
    return export(DEMO, tmp_path_factory.mktemp("rtx") / "engine", target="tensorrt-rtx").path


@pytest.fixture
def engine(demo: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(demo, tmp_path / "engine"))
