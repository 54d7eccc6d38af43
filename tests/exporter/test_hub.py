"""Names of models on the hub: downloaded, found in the cache, or refused with the form that works offline."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qwenrt.exporter import export
from qwenrt.plugins import ConfigError

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def offline(model: str, tmp_path: Path, **environment: str) -> str:
    code = (
        "import sys; from qwenrt.exporter import export; from qwenrt.plugins import ConfigError\n"
        "try:\n    export(sys.argv[1], sys.argv[2])\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, model, tmp_path / "engine"],
        env={**ENVIRONMENT, "HF_HOME": str(tmp_path / "home"), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not (tmp_path / "engine").exists()
    assert done.stdout.count("\n") == 1
    return done.stdout


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}], ids=str)
def test_without_a_network_the_local_form_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    message = offline("Qwen/Qwen3-0.6B", tmp_path, **environment)
    assert message.startswith("Qwen/Qwen3-0.6B is no folder here and cannot be downloaded")
    assert "qwenrt export ./Qwen3-0.6B OUT" in message


@pytest.mark.parametrize("model", ["./none", "none", "/none/at/all", "a/b/c", "", "../Qwen/Qwen3", "Qwen/Qwen3 0.6B"])
def test_what_is_no_hub_name_is_a_missing_folder(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint folder .* does not exist|config\.json is missing"):
        export(model, tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


def test_a_downloaded_snapshot_is_found_and_exported(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The layout of the hub's cache, filled by hand and read offline."""
    revision = "0" * 40
    repository = tmp_path / "home" / "hub" / "models--Tiny--Qwen3"
    snapshot = repository / "snapshots" / revision
    (repository / "refs").mkdir(parents=True)
    (repository / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    for path in tiny_checkpoint.iterdir():
        shutil.copy(path, repository / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    code = "from qwenrt.exporter.hub import local_checkpoint; print(local_checkpoint('Tiny/Qwen3', weights=True))"
    environment = {**ENVIRONMENT, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == snapshot
    export(snapshot, tmp_path / "engine")
