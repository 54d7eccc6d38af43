"""A server on a thread of the test's process, spoken to over real HTTP on the loopback."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from openai import OpenAI

from qwenrt.exporter import export
from qwenrt.runtime import LLM, LoRARequest
from qwenrt.runtime.async_llm import AsyncLLM
from qwenrt.runtime.server.app import create_app
from qwenrt.runtime.server.generation import Service
from qwenrt.runtime.server.run import listen
from qwenrt.runtime.server.sampling import recommended_sampling

from ...checkpoints import write_checkpoint


class Server:
    """Serves an LLM until it is stopped."""

    def __init__(
        self,
        llm: LLM,
        *,
        max_queue: int = 256,
        request_timeout: float | None = None,
        adapters: Sequence[LoRARequest] = (),
        **app_options: Any,
    ) -> None:
        self.llm = llm
        self._adapters = adapters
        self.async_llm: AsyncLLM
        self._options = {"max_queue": max_queue, "request_timeout": request_timeout}
        self._app_options = app_options
        self._socket = listen("127.0.0.1", 0)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.async_llm = AsyncLLM(self.llm, **self._options)
        service = Service(self.async_llm, "demo", recommended_sampling(self.llm.path), self._adapters)
        app = create_app(service, **self._app_options)
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
        asyncio.get_running_loop().call_later(0.1, self._started.set)
        await self._server.serve([self._socket])
        await self.async_llm.close()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def client(self, **options: Any) -> OpenAI:
        """OpenAI's own client."""
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 120, **options})

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request; `body` is sent as JSON unless it is bytes. Returns status, headers (lower case) and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """One request with a JSON answer, which must be strict JSON."""
        status, _, data = self.request("POST", path, body)
        return status, json.loads(data, parse_constant=_no_constant)

    def metric(self, name: str) -> float:
        """The sum of a metric's values."""
        _, _, data = self.request("GET", "/metrics")
        lines = [line.rsplit(" ", 1) for line in data.decode().splitlines() if line.startswith(f"{name}{{")]
        assert lines, name
        return sum(float(value) for _, value in lines)

    def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come true"
            time.sleep(0.01)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits and all blocks are free."""
        pool = self.llm.engine.scheduler.pool
        idle = self.async_llm.num_running == self.async_llm.num_waiting == 0
        return idle and not self.llm.engine.has_unfinished_requests() and pool.num_free == pool.num_blocks


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


@pytest.fixture(scope="session")
def long_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with byte tokens and room for answers that take minutes."""
    folder = tmp_path_factory.mktemp("long")
    write_checkpoint(folder / "checkpoint", max_position_embeddings=40_000)
    export(folder / "checkpoint", folder / "engine", block_size=16)
    return folder / "engine"


@pytest.fixture(scope="module")
def server(demo_engine: Path) -> Iterator[Server]:
    """The demo engine, served; what a test leaves behind shows at the end."""
    server = Server(LLM(demo_engine, num_kv_blocks=1024))
    yield server
    server.until(lambda: server.is_idle)
    server.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.client()
