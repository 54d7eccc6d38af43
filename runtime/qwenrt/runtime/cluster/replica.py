"""One replica of a server: an engine and the server's application around it, in a process of its own."""

from __future__ import annotations

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
        self._app = create_inner_app(service)
        self._id = serve.get_replica_context().replica_id.unique_id

    async def respond(self, request: ForwardedRequest, ticket: Ticket) -> AsyncIterator[ResponseStart | bytes]:
        """The start of the response and then its body in pieces; closing or cancelling it is the client leaving."""
        parts = stream_response(
            self._app, request.method, request.path, request.body, query=request.query, tenant=request.tenant
        )
        async with aclosing(parts):
            async for part in parts:
                yield part

    async def metrics(self) -> tuple[str, str]:
        """This replica's name, and its figures in Prometheus' text format."""
        return self._id, self._metrics.text().decode()

    async def check_health(self) -> None:
        """Raises when the engine has stopped: Ray Serve then replaces this replica."""
        if not self._llm.alive:
            raise QwenrtError(self._llm.refusal or "the engine stopped")
