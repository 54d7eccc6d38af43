"""Writes engine folders, whole or not at all.

A folder is built in a hidden sibling and gets its name when it is whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from qwenrt.plugins import ConfigError
from qwenrt.runtime.engine_dir import MANIFEST_NAME, EngineDir, EngineManifest, FileEntry, sha256_of
from qwenrt.runtime.plan import Plan


class EngineDirWriter:
    """A folder being built; put files into `path` and call `seal` once they are all there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sealed = False

    def seal(self, manifest: EngineManifest) -> EngineDir:
        """Hash the files now in the folder and write the manifest that lists them; returns the folder, which has no name yet."""
        files = {path.name: _synced_entry(path) for path in sorted(self.path.iterdir())}
        sealed = dataclasses.replace(manifest, files=files)
        _write_manifest(self.path, sealed)
        self.sealed = True
        return EngineDir(self.path, sealed)


@contextlib.contextmanager
def write_engine_dir(out: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[EngineDirWriter]:
    """Build an engine folder in a hidden sibling of `out` and give it its name when the block ends and it was sealed.

    On an exception, or when the process is killed, nothing stands at `out` that was not there before; what a killed process
    left is removed by the next export to the same name. Raises ConfigError when `out` exists and is not an engine folder, or
    is one and `overwrite` is false, or when its parent cannot be written.
    """
    target = Path(os.path.abspath(out))
    _check_target(target, overwrite)
    with staging_folder(target) as partial:
        writer = EngineDirWriter(partial)
        yield writer
        assert writer.sealed, "an engine folder was not sealed"
        _check_target(target, overwrite)
        if not target.exists():
            partial.rename(target)
        elif not _exchanged(partial, target):
            _rename_over(partial, target)


@contextlib.contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A hidden sibling of the engine folder `target`, locked while the block runs and removed after it.

    What killed processes left of theirs is removed first. Raises ConfigError when the parent cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        partial, lock = _locked_sibling(target)
    except OSError as error:
        raise ConfigError(
            f"cannot write engine folder {target}: {error.strerror}; choose a folder that you can write"
        ) from None
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _locked_sibling(target: Path) -> tuple[Path, int]:
    """A new hidden sibling of `target`, and the descriptor whose lock tells others that its writer lives."""
    while True:
        partial = target.parent / f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
        partial.mkdir()
        # Until it is locked, another process takes it for abandoned.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(partial, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if partial.exists():
                return partial, lock
            os.close(lock)


def _exchanged(one: Path, other: Path) -> bool:
    """Swap two folders' names in one step, by Linux's renameat2; False where the system or the file system cannot."""
    exchange = 2  # RENAME_EXCHANGE
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    here = -100  # AT_FDCWD
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def _rename_over(partial: Path, target: Path) -> None:
    """Put `partial` in the place of the folder `target`, which goes back there if that fails."""
    replaced = partial.with_name(f"{partial.name}-replaced")
    target.rename(replaced)
    try:
        partial.rename(target)
    except BaseException:
        replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def add_plan(engine: EngineDir, plan: Plan, built: Path) -> EngineDir:
    """Move the plan at `built`, on the folder's disk, into the folder, and list it in place of one of that name.

    Wherever this is killed the folder stays whole: the manifest names a plan only while its file is what the manifest says.
    """
    entry = _synced_entry(built)
    # The graph is the one file of a folder that is never replaced.
    with engine.file(engine.manifest.graph_name(plan.rank)).open("rb") as graph:
        fcntl.flock(graph, fcntl.LOCK_EX)
        manifest = EngineDir.open(engine.path).manifest
        files = {name: file for name, file in manifest.files.items() if name != plan.file}
        plans = tuple(one for one in manifest.plans if one.file != plan.file)
        if plan.file in manifest.files:
            _write_manifest(engine.path, dataclasses.replace(manifest, files=files, plans=plans))
        built.replace(engine.path / plan.file)
        extended = dataclasses.replace(manifest, files={**files, plan.file: entry}, plans=(*plans, plan))
        _write_manifest(engine.path, extended)
    return EngineDir(engine.path, extended)


def _synced_entry(path: Path) -> FileEntry:
    """Size and hash of a file that is safe on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileEntry(size=path.stat().st_size, sha256=sha256_of(path))


def _write_manifest(folder: Path, manifest: EngineManifest) -> None:
    """Write `engine.json` in one step."""
    partial = folder / f".{MANIFEST_NAME}.partial"
    with partial.open("w", encoding="utf-8") as text:
        text.write(manifest.to_json())
        text.flush()
        os.fsync(text.fileno())
    partial.replace(folder / MANIFEST_NAME)


def _check_target(target: Path, overwrite: bool) -> None:
    try:
        str(target).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{target} is not valid UTF-8, which onnx needs of a path; choose another name") from None
    if not target.exists() and not target.is_symlink():
        return
    if target.is_dir() and not target.is_symlink():
        if (target / MANIFEST_NAME).is_file():
            if overwrite:
                return
            raise ConfigError(f"engine folder {target} exists; choose another name or pass --force to replace it")
        if not any(target.iterdir()):
            return
    raise ConfigError(f"{target} exists and is not an engine folder; choose another name")


def _remove_abandoned(target: Path) -> None:
    """Remove what killed exports left; a folder whose writer lives is locked."""
    for path in target.parent.iterdir():
        if not path.name.startswith(f".{target.name}.partial-"):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
