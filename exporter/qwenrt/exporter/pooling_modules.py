"""What sentence-transformers' files beside a checkpoint say about pooling."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from qwenrt.plugins import ConfigError

from .folder import plain_file
from .json_fields import read_config, shown

_MODULES = "modules.json"
_KNOWN = ("Transformer", "Pooling", "Normalize")
_MAX_BYTES = 1 << 20


def pools_last_token(folder: Path) -> bool:
    """Whether modules.json makes the checkpoint an embedding model: the decoder, then the hidden state of the last token.

    Normalisation is the caller's choice at run time. Raises ConfigError for an embedding model that pools in another way, or
    has layers after pooling, since its embeddings would be wrong here.
    """
    if not os.path.lexists(folder / _MODULES):
        return False
    path = plain_file(folder, _MODULES)
    modules = _modules(path)
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if "Pooling" not in kinds:
        return False
    for kind in kinds:
        if kind not in _KNOWN:
            raise ConfigError(f"{path} has a module {shown(kind)}, supported are {', '.join(_KNOWN)}")
    where = modules[kinds.index("Pooling")].get("path")
    if not isinstance(where, str) or not where or where != Path(where).name or where in (".", ".."):
        raise ConfigError(f"{path}: the path of Pooling is {shown(where)}, must be a folder's name")
    if (folder / where).is_symlink():
        raise ConfigError(f"{folder / where} is a link; replace it by the folder it points to")
    fields = read_config(plain_file(folder / where, "config.json"))
    # Older files have a switch for each mode, newer ones the mode's name.
    modes = [name for name, value in fields.values.items() if name.startswith("pooling_mode_") and value is True]
    mode = fields.values.get("pooling_mode", "+".join(modes).replace("pooling_mode_", ""))
    if mode != "lasttoken":
        raise ConfigError(f"{fields.source}: pooling is {shown(mode)}, supported is lasttoken")
    return True


def _modules(path: Path) -> list[dict[str, Any]]:
    if path.stat().st_size > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES} bytes; download the checkpoint again")
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); download the checkpoint again") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{path} must hold a list of objects; download the checkpoint again")
    return modules
