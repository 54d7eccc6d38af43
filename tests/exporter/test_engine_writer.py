"""Engine folders appear whole or not at all, whatever happens to those who write them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import pytest

from qwenrt.exporter import engine_writer
from qwenrt.exporter.engine_writer import write_engine_dir
from qwenrt.runtime import ConfigError, EngineDir
from tests.runtime.test_engine_dir import write


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with write_engine_dir(tmp_path / "out") as writer:
            (writer.path / "model.onnx").write_text("graph")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())


def hang_while_writing(out: Path) -> None:
    with write_engine_dir(out) as writer:
        (writer.path / "started").touch()
        time.sleep(60)


def test_a_killed_writer_leaves_no_folder_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=hang_while_writing, args=(tmp_path / "out",))
    process.start()
    while not list(tmp_path.glob(".out.partial-*/started")):
        time.sleep(0.01)
    write(tmp_path / "other")
    assert list(tmp_path.glob(".out.partial-*")), "a live writer's folder was removed"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "out").exists()
    write(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_an_engine_is_replaced_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out)
    with pytest.raises(ConfigError, match="exists; choose another name or pass --force"):
        write(out)
    write(out, overwrite=True, text="other weights")
    assert EngineDir.open(out).file("model.safetensors").read_text() == "other weights"


def count_absences(path: Path, absences: Synchronized[int], stop: Path) -> None:
    while not stop.exists():
        absences.value += not path.exists()


def test_an_engine_that_is_replaced_is_there_all_the_time(tmp_path: Path) -> None:
    write(tmp_path / "out")
    context = multiprocessing.get_context("fork")
    absences = context.Value("i", 0)
    watcher = context.Process(
        target=count_absences, args=(tmp_path / "out" / "engine.json", absences, tmp_path / "stop")
    )
    watcher.start()
    for round_ in range(100):
        write(tmp_path / "out", overwrite=True, text=str(round_))
    (tmp_path / "stop").touch()
    watcher.join()
    assert absences.value == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "stop"]


def write_many(out: Path, overwrite: bool, outcomes: Queue[str]) -> None:
    for _ in range(50):
        try:
            write(out, overwrite=overwrite)
            outcomes.put("written")
        except BaseException as error:
            outcomes.put(str(error).replace(str(out), "OUT"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_writers_of_one_folder_at_once_end_with_a_whole_one(tmp_path: Path, overwrite: bool) -> None:
    context = multiprocessing.get_context("fork")
    outcomes: Queue[str] = context.Queue()
    writers = [context.Process(target=write_many, args=(tmp_path / "out", overwrite, outcomes)) for _ in range(4)]
    for writer in writers:
        writer.start()
    counts = Counter(outcomes.get(timeout=60) for _ in range(200))
    for writer in writers:
        writer.join()
    exists = "engine folder OUT exists; choose another name or pass --force to replace it"
    assert counts == ({"written": 200} if overwrite else {"written": 1, exists: 199})
    EngineDir.open(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_folders_cannot_be_exchanged_a_failure_puts_the_old_engine_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write(out, text="old")
    monkeypatch.setattr(engine_writer, "_exchanged", lambda one, other: False)
    write(out, overwrite=True, text="new")
    assert EngineDir.open(out).file("model.safetensors").read_text() == "new"
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if target == out and not path.name.endswith("-replaced"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(KeyboardInterrupt):
        write(out, overwrite=True, text="newer")
    assert EngineDir.open(out).file("model.safetensors").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["a*", "[ab]", "a**b", "a b\nc", "?", "ü", "-f"])
def test_any_name_will_do_and_only_its_own_leftovers_are_removed(tmp_path: Path, name: str) -> None:
    for leftover in (f".{name}.partial-1", ".aab.partial-1", ".a.partial-1", ".b.partial-1"):
        (tmp_path / leftover).mkdir()
    write(tmp_path / name)
    EngineDir.open(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {name, ".aab.partial-1", ".a.partial-1", ".b.partial-1"}


def test_a_path_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not valid UTF-8"):
        write(tmp_path / "\udcff" / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_not_an_engine_folder_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    for name in ("precious", "file", "link"):
        with pytest.raises(ConfigError, match=f"{name} exists and is not an engine folder"):
            write(tmp_path / name, overwrite=overwrite)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years"


def test_a_parent_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(ConfigError, match="cannot write engine folder"):
        write(tmp_path / "file" / "out")
