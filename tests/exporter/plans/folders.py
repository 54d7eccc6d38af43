"""The checkpoint that plans are built from, and what a folder holds."""

from __future__ import annotations

from pathlib import Path

DEMO = Path(__file__).resolve().parents[3] / "tools" / "demo" / "checkpoint"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
