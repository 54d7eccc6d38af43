"""One replica of a server: an engine and the server's application around it, in a process of its own."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ray import serve

from qwenrt.plugins import QwenrtError

from ..async_llm import AsyncLLM
from ..llm import LLM
from ..server.app import create_inner_app
from ..server.generation import Service
from ..server.inprocess import ResponseStart, stream_response
from ..server.run import ServerOptions
from ..server.sampling import recommended_sampling
from .ticket import Ticket


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """An HTTP request whose key and body were checked."""

    method: str
    path: str
    query: bytes
    body: bytes
    tenant: str
    id: str
    """No other request has it."""

    @classmethod
    def of(cls, method: str, path: str, query: bytes = b"", body: bytes = b"", tenant: str = "") -> ForwardedRequest:
        """A request with an id."""
        return cls(method, path, query, body, tenant, uuid.uuid4().hex)


class Replica:
    """What runs in the replica's process; Ray Serve calls it.

    engine: path of the engine folder there. arguments: those of LLM. created: seconds since 1970, for clients
    that ask about the model.
    """

    def __init__(self, engine: str, arguments: Mapping[str, Any], options: ServerOptions, created: int) -> None:
        llm = LLM(engine, **arguments)
        for adapter in options.adapters:
            llm.engine.adapters.get(adapter)
        self._llm = AsyncLLM(llm, max_queue=options.max_queue, request_timeout=options.request_timeout)
        service = Service(self._llm, options.model, recommended_sampling(llm.path), options.adapters)
        service.created = created
        self._metrics = service.metrics
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._aborted: deque[str] = deque(maxlen=256)
        self._app = create_inner_app(service)
        self._id = serve.get_replica_context().replica_id.unique_id

    async def respond(self, request: ForwardedRequest, ticket: Ticket) -> AsyncIterator[ResponseStart | bytes]:
        """The start of the response and then its body in pieces; closing or cancelling it is the client leaving."""
        if request.id in self._aborted:
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks[request.id] = task
        parts = stream_response(
            self._app, request.method, request.path, request.body, query=request.query, tenant=request.tenant
        )
        try:
            async with aclosing(parts):
                async for part in parts:
                    yield part
        finally:
            del self._tasks[request.id]

    async def abort(self, request_id: str) -> None:
        """End a request if it is here, or when it comes."""
        task = self._tasks.get(request_id)
        if task is None:
            self._aborted.append(request_id)
        else:
            task.cancel()

    async def metrics(self) -> tuple[str, str]:
        """This replica's name, and its figures in Prometheus' text format."""
        return self._id, self._metrics.text().decode()

    async def check_health(self) -> None:
        """Raises when the engine has stopped: Ray Serve then replaces this replica."""
        if not self._llm.alive:
            raise QwenrtError(self._llm.refusal or "the engine stopped")
