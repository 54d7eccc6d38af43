"""Batches in polygraphy's JSON, which its tools read: a file that holds a list of them, or a folder with a file for each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import ml_dtypes
import numpy as np
from polygraphy.comparator import StreamingDataLoader
from polygraphy.exception import PolygraphyException
from polygraphy.json import to_json
from polygraphy.logger import G_LOGGER

from qwenrt.plugins import ConfigError, QwenrtError
from qwenrt.runtime import EngineManifest

from .batches import Batch
from .feeds import INDEX_INPUTS, Array, check_feed


def load_batches(path: Path, manifest: EngineManifest) -> Iterator[Batch]:
    """The batches of a file or a folder, one at a time; raises ConfigError where one is not a step of this engine."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; record batches with: qwenrt generate ENGINE PROMPT --record {path}")
    for number, values in enumerate(_loaded(path)):
        feed = {name: _as_fed(name, value) for name, value in values.items()}
        check_feed(feed, manifest)
        yield Batch(f"{path.name}[{number}]", feed)


def _loaded(path: Path) -> Iterator[Mapping[str, Any]]:
    feeds = iter(StreamingDataLoader([str(path)], allow_dirs=True))
    try:
        while True:
            # polygraphy logs to stdout, which is the answer's; what it has to say comes as an exception too.
            with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
                values = next(feeds, None)
            if values is None:
                return
            if not isinstance(values, Mapping):
                raise ValueError(f"it holds {type(values).__name__}, not named arrays")
            yield values
    except (PolygraphyException, ValueError, OSError, RecursionError) as error:
        if isinstance(error, QwenrtError):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{path} holds no batches in polygraphy's JSON: {reason}") from None


def _as_fed(name: str, value: Any) -> Array:
    """An array as feeds have it: index inputs int32 where they fit, and bfloat16, to polygraphy a torch tensor, as ml_dtypes."""
    if not isinstance(value, np.ndarray):
        from .runners.executors import to_numpy

        return to_numpy(value)
    if name in INDEX_INPUTS and value.dtype.kind in "iu" and (value.astype(np.int32) == value).all():
        return value.astype(np.int32)
    return value


class BatchWriter:
    """Writes feeds as they come, so that one at a time is in memory."""

    def __init__(self, folder: Path | None, file: TextIO | None) -> None:
        self._folder, self._file = folder, file
        self.count = 0
        self.size = 0
        """Bytes so far."""

    def append(self, feed: Mapping[str, Array]) -> None:
        """Write one more feed."""
        text = to_json({name: _savable(array) for name, array in feed.items()})
        if self._folder is not None:
            (self._folder / f"{self.count:010}.json").write_text(text, encoding="utf-8")
        if self._file is not None:
            self._file.write(("," if self.count else "") + text)
        self.count += 1
        self.size += len(text)


@contextmanager
def batch_writer(path: Path) -> Iterator[BatchWriter]:
    """Write batches to a file, if the path has a suffix, or to a folder; it appears when the block ends without an exception.

    Raises ConfigError if the path exists or cannot be written.
    """
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} exists; choose another name")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with ExitStack() as stack:
        try:
            if path.suffix:
                file = stack.enter_context(partial.open("x", encoding="utf-8"))
            else:
                partial.mkdir()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another place") from None
        stack.callback(lambda: shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True))
        if path.suffix:
            file.write("[")
            yield BatchWriter(None, file)
            file.write("]\n")
            file.close()
        else:
            yield BatchWriter(partial, None)
        partial.rename(path)


def _savable(array: Array) -> Any:
    """The array, or a torch tensor in the place of bfloat16, which NumPy's file format does not have."""
    if array.dtype != ml_dtypes.bfloat16:
        return array
    from .runners.executors import to_torch

    return to_torch(array)
