"""`qwenrt batch --ray`: workers in processes of their own, of which any may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .batch_file import chat_row, contents, examples, read_answers, write_rows
from .command import qwenrt, start
from .conftest import Here
from .processes import family, reachable_ports


def wait_for_bytes(path: Path, size: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 400
    while not path.exists() or path.stat().st_size < size:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_two_workers_answer_each_row_once_though_one_is_killed(demo_engine: Path, tmp_path: Path) -> None:
    chosen = examples(400)
    rows = [chat_row(f"{index}", chosen[index % len(chosen)]) for index in range(2000)]
    path, out = write_rows(tmp_path / "in", rows), tmp_path / "out"
    process = start("batch", demo_engine, path, out, "--ray", "local", "--workers", "2")
    wait_for_bytes(out, 2000 * 570 // 2, process)
    processes = family(process.pid)
    actors = [pid for pid, args in processes.items() if "_EngineActor" in args]
    assert len(actors) == 2
    assert not reachable_ports(set(processes))
    before = out.read_bytes()
    os.kill(actors[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    # Ray adds a line about the worker.
    assert stderr.endswith(b"2000 rows done, 0 of them with an error; 0 were there already\n")
    assert out.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    answers = contents(out)
    assert answers.keys() == {row["custom_id"] for row in rows}
    assert qwenrt("batch", demo_engine, path, tmp_path / "alone")[0] == 0
    assert contents(tmp_path / "alone") == answers
    assert not [pid for pid in processes if pid != process.pid and Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_a_run_on_ray_goes_on_from_one_without(demo_engine: Path, tmp_path: Path) -> None:
    chosen = examples(12)
    first = write_rows(tmp_path / "in", [chat_row(f"{index}", chosen[index]) for index in range(6)])
    assert qwenrt("batch", demo_engine, first, tmp_path / "out")[0] == 0
    before = read_answers(tmp_path / "out")
    every = [chat_row(f"{index}", chosen[index]) for index in range(12)]
    status, _, stderr = qwenrt(
        "batch", demo_engine, write_rows(tmp_path / "in", every), tmp_path / "out", "--ray", "local"
    )
    assert (status, stderr) == (0, "6 rows done, 0 of them with an error; 6 were there already\n")
    after = read_answers(tmp_path / "out")
    assert after[:6] == before and len(after) == 12


def test_what_ray_needs_is_said_in_one_line(demo_engine: Path, here: Here, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in", [])
    assert here("batch", demo_engine, path, tmp_path / "out", "--workers", "2")[0] == 2
    status, _, stderr = qwenrt("batch", demo_engine, path, tmp_path / "out", "--ray", "local", blocked=("ray",))
    assert (status, stderr) == (1, "qwenrt: error: this needs ray; install it with: pip install 'qwenrt[ray]'\n")


def test_threads_are_shared_out_so_that_every_engine_finds_a_node() -> None:
    from qwenrt.runtime import ConfigError
    from qwenrt.runtime.cluster.session import threads_for

    assert threads_for(1, [2.0]) == 2
    assert threads_for(2, [2.0]) == 1
    assert threads_for(2, [6.0, 2.0]) == 3
    assert threads_for(3, [4.0, 4.0]) == 2
    assert threads_for(4, [16.0] * 4) == 16
    with pytest.raises(ConfigError, match="3 engines need a CPU each, and the Ray cluster has 2; run fewer"):
        threads_for(3, [2.0])
