"""An engine that is split over ranks: the first one here, each other one in a process that this one starts.

Every rank runs its own graph over its own KV pool. They compute a step together: the collectives in their graphs make them wait
for each other, and the first one has the logits.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from qwenrt.plugins import ConfigError, DeviceError

from ..adapters import LoraStacks
from ..engine_dir import EngineDir, Limits
from ..kv_budget import KvBudget
from ..model_runner import StepInputs
from .rank_worker import RankSetup, pack, unpack
from .torch import TorchBackend, check_device

_POLL_SECONDS = 1.0
_END_SECONDS = 10.0
"""What a process gets to end by itself when its connection has."""

Result = TypeVar("Result")
_Work = tuple[concurrent.futures.Future[Any], Callable[[], Any]]


@dataclass(frozen=True)
class _Worker:
    """A rank's process and the connection to it."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection


class TensorParallelBackend:
    """Backend torch over all ranks of an engine; those on GPUs have one each, from the given one on."""

    lora: LoraStacks | None = None

    def __init__(self, engine: EngineDir, *, device: str, limits: Limits, budget: KvBudget, threads: int) -> None:
        """Raises ConfigError if a rank cannot be loaded. threads: of all ranks together, on the CPU."""
        size = engine.manifest.tp
        devices = _devices(engine, device)
        meeting_place = Path(tempfile.mkdtemp(prefix="qwenrt-ranks-"))
        self._workers: list[_Worker] = []
        # A signal's exception strikes the main thread alone, so in this one a step is never cut short, and ranks stay together.
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        threading.Thread(target=_work_off, args=(self._work,), name="qwenrt-rank-0", daemon=True).start()
        # Runs when this is no longer used, at the latest when Python ends. If that is killed, the connections end all the same.
        self._stop = weakref.finalize(self, _stop, self._workers, meeting_place, self._work)
        setups = [
            RankSetup(
                engine=os.path.abspath(engine.path),
                meeting_place=str(meeting_place),
                rank=rank,
                device=devices[rank],
                limits=limits,
                budget=budget,
                threads=max(1, threads // size),
            )
            for rank in range(size)
        ]
        self._first: TorchBackend | None = None
        try:
            for setup in setups[1:]:
                self._workers.append(_start(setup.rank))
            for worker, setup in zip(self._workers, setups[1:], strict=True):
                worker.connection.send_bytes(setup.to_json())
            for worker in self._workers:
                worker.connection.recv_bytes()
            self._first = self._run(setups[0].load)
        except (EOFError, OSError, RuntimeError) as error:
            raise ConfigError(f"{engine.path} cannot be loaded: {self._what_happened(error)}") from None
        except BaseException:
            self._stop()
            raise
        self.num_kv_blocks = self._first.num_kv_blocks

    def execute(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Run every rank's graph once; returns logits [R, vocab], valid until the next call.

        Raises DeviceError, saying which rank, if one failed or is gone; then all have ended.
        """
        if not self._stop.alive:
            raise DeviceError("the ranks of this engine have ended")
        first, frame = self._first, pack(inputs)
        assert first is not None

        def step() -> npt.NDArray[np.float32]:
            for worker in self._workers:
                worker.connection.send_bytes(frame)
            # The frame's arrays, for the caller may be interrupted and use its own for another step.
            return first.execute(unpack(frame))

        try:
            logits = self._run(step)
            if self._is_one_gone():
                raise EOFError("a rank has ended")
        except Exception as error:
            raise DeviceError(self._what_happened(error)) from error
        return logits

    def _is_one_gone(self) -> bool:
        return any(worker.process.poll() is not None for worker in self._workers)

    def read_kv_blocks(self, layer: int, blocks: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        """Raises ConfigError: each rank has a part of the pool."""
        raise ConfigError(
            "the KV pool of a tensor-parallel engine lies in several processes and cannot be read from here"
        )

    def write_kv_blocks(self, layer: int, blocks: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> None:
        """Raises ConfigError: each rank has a part of the pool."""
        raise ConfigError(
            "the KV pool of a tensor-parallel engine lies in several processes and cannot be written from here"
        )

    def _run(self, work: Callable[[], Result]) -> Result:
        """What `work` gives in the first rank's thread; however this is interrupted, it is done when this returns or raises.

        Raises EOFError if a rank ends before all have met, which the first one may go on waiting for.
        """
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._work.put((future, work))
        interruption: BaseException | None = None
        gone = False
        while not future.done():
            try:
                concurrent.futures.wait([future], timeout=_POLL_SECONDS)
                gone = not future.done() and self._is_one_gone()
                if gone and self._first is not None:
                    self._first.abort()
            except BaseException as raised:
                interruption = raised
            if gone and self._first is None:
                raise EOFError("a rank has ended")
        if interruption is not None and future.exception() is None:
            raise interruption
        return future.result()

    def _what_happened(self, error: Exception) -> str:
        """Why a step failed, by the rank that failed first as far as that can be known; ends all ranks."""
        ends = [(worker.rank, worker.process.pid, _how_it_ended(worker)) for worker in self._workers]
        self._stop()
        told = [f"rank {rank} (process {pid}) {how}" for rank, pid, how in ends if how]
        return "; ".join(told) if told else f"rank 0: {type(error).__name__}: {error}"


def _devices(engine: EngineDir, device: str) -> list[str]:
    """Each rank's device."""
    size = engine.manifest.tp
    first = torch.device(device)
    check_device(first, engine)
    if first.type == "cpu":
        return ["cpu"] * size
    devices = [f"cuda:{(first.index or 0) + rank}" for rank in range(size)]
    if (count := torch.cuda.device_count()) < (first.index or 0) + size:
        raise ConfigError(
            f"{engine.path} has {size} ranks, which take the GPUs {devices[0]} to {devices[-1]}; this machine has {count}"
        )
    return devices


def _start(rank: int) -> _Worker:
    """Start the process of a rank."""
    ours, theirs = Pipe()
    command = [sys.executable, "-m", f"{__package__}.rank_worker", str(theirs.fileno())]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Ctrl-C in a terminal is for the first rank, which lives on.
        start_new_session=True,
    )
    theirs.close()
    return _Worker(rank, process, ours)


def _how_it_ended(worker: _Worker) -> str | None:
    """What a worker said before it ended, or how it ended; None while it lives."""
    try:
        while worker.connection.poll(_POLL_SECONDS):
            if text := worker.connection.recv_bytes().decode():
                return f"failed: {text}"
        return None
    except (EOFError, OSError):
        # Its end of the connection is closed, and so it has ended or is about to.
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = worker.process.wait(_END_SECONDS)
            return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return "closed its connection"


def _work_off(work: queue.SimpleQueue[_Work | None]) -> None:
    """Do what comes, until None does. Python does not wait for this thread, which may wait for a rank that never was there."""
    while (item := work.get()) is not None:
        future, function = item
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        # What is done must not keep the backend alive.
        del item, future, function


def _stop(workers: Sequence[_Worker], meeting_place: Path, work: queue.SimpleQueue[_Work | None]) -> None:
    """End all workers, whatever they do, and wait for them."""
    work.put(None)
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        try:
            worker.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
    shutil.rmtree(meeting_place, ignore_errors=True)
