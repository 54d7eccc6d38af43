"""A checkpoint folder's files: which of them may be opened."""

from __future__ import annotations

import os
from pathlib import Path

from qwenrt.plugins import ConfigError


def checked_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder as a path; raises ConfigError if there is none."""
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"checkpoint folder {path} does not exist; give a folder with config.json and safetensors")
    return path


def plain_file(folder: Path, name: str) -> Path:
    """The path of a plain file in `folder`; raises ConfigError if there is none.

    A link is followed only where Hugging Face's cache has them: from snapshots/REVISION/ to blobs/ of the same repository.
    """
    path = folder / name
    if path.is_symlink():
        snapshots = folder.resolve().parent
        if snapshots.name != "snapshots" or path.resolve().parent != snapshots.parent / "blobs":
            raise ConfigError(f"{path} is a link that leaves its folder; replace it by the file it points to")
    if not path.exists():
        raise ConfigError(f"{path} is missing; download the checkpoint again")
    if not path.is_file():
        raise ConfigError(f"{path} is not a plain file; download the checkpoint again")
    return path
