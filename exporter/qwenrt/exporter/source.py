"""Where a model comes from: a checkpoint folder, the Hugging Face hub, or a GGUF file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Protocol

from qwenrt.plugins import ConfigError
from qwenrt.runtime.text.chat_template import ChatTemplate
from qwenrt.runtime.text.tokenizer import Tokenizer

from .checkpoint import Checkpoint, open_checkpoint
from .config import ModelConfig
from .folder import plain_file
from .gguf_model import GgufModel
from .hub import local_checkpoint
from .json_fields import read_json_object

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_OPTIONAL_FILES = ("chat_template.jinja", "generation_config.json")


class Source(Protocol):
    """A model that can be exported; everything raises ConfigError naming what is wrong."""

    @property
    def config(self) -> ModelConfig:
        """Its decoder."""

    def checkpoint(self) -> Checkpoint:
        """Its tensors, downloaded if need be."""

    def texts(self) -> dict[str, bytes]:
        """What an engine folder holds of it beside graph and weights, by file name: the tokenizer, a chat template."""


class FolderSource:
    """A folder with config.json and safetensors, or the hub's name of one."""

    def __init__(self, model: str | os.PathLike[str], task: str | None) -> None:
        self._model = model
        self.config = ModelConfig.from_dir(local_checkpoint(model, weights=False), task)

    def checkpoint(self) -> Checkpoint:
        """See `Source`."""
        return open_checkpoint(local_checkpoint(self._model, weights=True))

    def texts(self) -> dict[str, bytes]:
        """See `Source`; the files as they are."""
        folder = local_checkpoint(self._model, weights=True)
        names = [name for name in _OPTIONAL_FILES if os.path.lexists(folder / name)]
        files = {name: plain_file(folder, name) for name in (*_TOKENIZER_FILES, *names)}
        for name, path in files.items():
            if name.endswith(".json"):
                read_json_object(path)
        _check_texts(folder)
        return {name: path.read_bytes() for name, path in files.items()}


class GgufSource:
    """A GGUF file."""

    def __init__(self, path: Path, task: str | None) -> None:
        self._path = path
        self._model = GgufModel(path, task)
        self.config = self._model.config

    def checkpoint(self) -> Checkpoint:
        """See `Source`."""
        return self._model.checkpoint()

    def texts(self) -> dict[str, bytes]:
        """See `Source`; made from the metadata."""
        texts = self._model.texts()
        with tempfile.TemporaryDirectory(prefix="qwenrt-") as name:
            for file, data in texts.items():
                Path(name, file).write_bytes(data)
            try:
                _check_texts(Path(name))
            except ConfigError as error:
                raise ConfigError(f"{self._path}: {str(error).replace(f'{name}/', '')}") from None
        return texts


def source_of(model: str | os.PathLike[str], task: str | None = None) -> Source:
    """The source that `model` names: a file is a GGUF, anything else a folder or a hub id.

    task: what the model is to be used for, by default what it was made for.
    """
    return GgufSource(Path(model), task) if Path(model).is_file() else FolderSource(model, task)


def _check_texts(folder: Path) -> None:
    """Refuse here what a runtime would refuse to load."""
    Tokenizer.from_dir(folder)
    ChatTemplate.from_dir(folder)
