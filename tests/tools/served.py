"""A running `qwenrt serve`, for tests that need a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
from pathlib import Path
from typing import Any

from .command import start


class Served:
    """A running `qwenrt serve`."""

    def __init__(self, engine: Path, *arguments: str) -> None:
        self.process = start("serve", engine, "--port", "0", "--num-kv-blocks", "512", *arguments)
        assert self.process.stderr is not None
        line = self.process.stderr.readline().decode()
        match = re.fullmatch(r"serving (\S+) at http://127\.0\.0\.1:(\d+)\n", line)
        assert match, line
        self.model, self.port = match[1], int(match[2])

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def stream(self, body: dict[str, Any]) -> list[str]:
        """The data of all events of a streamed completion."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(
                "POST", "/v1/completions", json.dumps({**body, "stream": True}), {"Content-Type": "application/json"}
            )
            data = connection.getresponse().read().decode()
        assert data.endswith("\n\n")
        return [event.removeprefix("data: ") for event in data.split("\n\n")[:-1]]

    def metrics(self, name: str) -> list[float]:
        """The values of a metric."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        return [float(value) for value in re.findall(rf"^{name}(?:\{{\S*)? (\S+)$", text, re.MULTILINE)]

    def metric(self, name: str) -> float:
        """The value of a metric that has one."""
        (value,) = self.metrics(name)
        return value

    def resident_bytes(self) -> int:
        """Memory of the process that no file backs."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) * 1024

    def end(self, signum: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(signum)
        _, stderr = self.process.communicate(timeout=120)
        return self.process.returncode, stderr.decode()
