"""Where a checkpoint comes from: a local folder, or the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from qwenrt.plugins import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TEXT_FILES = ["*.json", "*.jinja"]
_WEIGHT_FILES = ["*.safetensors"]


def local_checkpoint(model: str | os.PathLike[str], *, weights: bool) -> Path:
    """The folder of `model`, a path or a hub id such as Qwen/Qwen3-0.6B; downloads its JSON files, and with `weights` all of it.

    Raises ConfigError if the path does not exist, the hub has no such model, or the hub cannot be reached.
    """
    path = Path(model)
    if path.exists():
        return path
    if not isinstance(model, str) or not _HUB_ID.fullmatch(model):
        raise ConfigError(f"checkpoint folder {path} does not exist; give a folder with config.json and safetensors")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        raise ConfigError("downloading needs huggingface_hub; run: pip install 'qwenrt[export]'") from None
    remedy = f"download it where there is a network and give its folder: qwenrt export ./{model.split('/')[1]} OUT"
    patterns = _TEXT_FILES + (_WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except RepositoryNotFoundError:
        raise ConfigError(
            f"{model} is no folder here, and the Hugging Face hub shows no such model; correct the name, or log in to see it"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{model} is no folder here and cannot be downloaded ({type(error).__name__}: {reason}); {remedy}"
        ) from None
