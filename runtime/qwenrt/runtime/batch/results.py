"""The output of a batch job: a line for each row that is done, whole or not there."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from qwenrt.plugins import ConfigError

from .disk_set import DiskSet
from .rows import Row, custom_id_key
from .worker import Answer

_CHUNK = 1 << 20


class ResultFile:
    """A file that only grows, by whole lines; what an earlier run left in it counts.

    Opening it cuts off a last line that was not finished and learns which rows are there. A line is one system call
    made when its row is done, so a process that is killed loses none of them; `sync` makes them survive a power cut. Only
    one process has a file open. Raises ConfigError if the file is something else, or another process has it.

    on_read: called with the bytes of the lines read so far and of all, while an earlier run's lines are read.
    """

    def __init__(self, path: Path, on_read: Callable[[int, int], None] = lambda done, total: None) -> None:
        self.path = path
        self.failed = 0
        """Rows whose line tells of an error."""
        self.written = 0
        """Rows that have a line."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._done = DiskSet()
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(on_read)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"{path} is being written by another qwenrt batch; wait for it or write elsewhere"
            ) from None
        except BaseException:
            self.close()
            raise
        _sync_folder(path.parent)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, row: Row) -> bool:
        return row.key in self._done

    def write_answer(self, row: Row, answer: Answer) -> None:
        """Add the line of a row that was answered, be it with an error."""
        response = b'{"status_code":%d,"request_id":"req_%s","body":%s}' % (answer.status, _new_id(), answer.body)
        self._write(row, response, b"null", failed=answer.status >= 400)

    def write_error(self, row: Row, code: str, message: str) -> None:
        """Add the line of a row that is no request or could not be answered."""
        error: dict[str, str | int] = {"code": code, "message": message}
        if row.code is not None:
            error["line"] = row.line
        self._write(row, b"null", json.dumps(error).encode(), failed=True)

    def sync(self) -> None:
        """Return when what was written is on the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Let another process have the file."""
        self._done.close()
        os.close(self._descriptor)

    def _write(self, row: Row, response: bytes, error: bytes, *, failed: bool) -> None:
        custom_id = json.dumps(row.custom_id).encode()
        line = b'{"id":"batch_req_%s","custom_id":%s,"response":%s,"error":%s}\n' % (
            _new_id(),
            custom_id,
            response,
            error,
        )
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self.written += 1
        self.failed += failed

    def _read(self, on_read: Callable[[int, int], None]) -> None:
        """Repair the end, and take in what the lines are about."""
        total = self._cut_unfinished_line()
        done = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                self._note(number, line)
                done += len(line)
                if number % 1000 == 0:
                    on_read(done, total)

    def _cut_unfinished_line(self) -> int:
        """Returns the size of the file afterwards."""
        size = end = os.fstat(self._descriptor).st_size
        while end:
            start = max(0, end - _CHUNK)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end == 0 and size and os.pread(self._descriptor, 7, 0) != b'{"id":"'[:size]:
            # One line without an end, which is not the beginning of one of ours.
            raise ConfigError(f"{self.path} is no batch output; move it away or write elsewhere")
        os.ftruncate(self._descriptor, end)
        return end

    def _note(self, number: int, line: bytes) -> None:
        try:
            data = json.loads(line)
            error, response, custom_id = data["error"], data["response"], data["custom_id"]
            if error is None:
                self.failed += response["status_code"] >= 400
                key = custom_id_key(custom_id)
            else:
                self.failed += 1
                key = b"line %d" % error["line"] if "line" in error else custom_id_key(custom_id)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{self.path} line {number} is no line of a batch output; move the file away or write elsewhere"
            ) from None
        self.written += 1
        self._done.add(key)


def _new_id() -> bytes:
    return uuid.uuid4().hex.encode()


def _sync_folder(path: Path) -> None:
    """Make a new file's name survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
