"""What the commands say of an engine that is split over ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .conftest import Here


def test_export_inspect_and_compare(tiny_checkpoint: Path, tmp_path: Path, here: Here) -> None:
    engine = tmp_path / "engine"
    assert here("export", tiny_checkpoint, engine, "--tp", "2")[0] == 0
    assert re.search(r"tensor parallel +2 ranks", here("inspect", engine)[1])
    report = json.loads(here("inspect", engine, "--json")[1])
    assert report["tp"] == 2
    # Every rank has one of the two K/V heads: together they take what one rank takes.
    assert report["kv_bytes_per_token"] == 4 * 2 * 2 * 32 * 4
    status, _, error = here("compare", engine)
    assert status == 1
    assert "is split over 2 ranks" in error
    assert "compare an export without --tp" in error
