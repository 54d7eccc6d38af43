"""What clients of several replicas talk to: one server, which gives each request to a replica and its answer back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ..async_llm import UnavailableError
from ..server.app import add_guards
from ..server.errors import ApiError, as_api_error, error_response
from ..server.inprocess import ResponseStart
from ..server.metrics import CONTENT_TYPE
from ..server.middleware import BODY_METHODS
from ..server.streaming import LAST_EVENT, SEND_TIMEOUT, ClientLeftError, error_event, until_client_leaves
from .fleet import Fleet
from .prompt_keys import PromptKeys
from .replica import ForwardedRequest

_READY_SECONDS = 5.0
"""In which a replica must say that it is ready."""


class Front:
    """The ASGI application behind the guards. `keys` is what requests are routed by, and may be replaced."""

    def __init__(self, fleet: Fleet, keys: PromptKeys) -> None:
        self.keys = keys
        self._fleet = fleet
        self._refusal: str | None = None
        # Of each request that was accepted, when it is cut off.
        self._open: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def guarded(self, *, api_keys: Sequence[str], cors_origins: Sequence[str]) -> Starlette:
        """The application with what keeps clients in check."""
        app = Starlette(routes=[Route("/{path:path}", self)])
        add_guards(app, api_keys=api_keys, cors_origins=cors_origins)
        return app

    async def drain(self, timeout: float) -> None:
        """Take no more requests, and wait for those taken until they are finished or `timeout` seconds are over; these fail."""
        self._refusal = "the server is shutting down"
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            self._refusal += f", and the request was not finished within {timeout:g} s"
            for deadline in self._open:
                deadline.reschedule(0)
            await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        answer = _Answer(scope, receive, send)
        try:
            own = _OWN_PATHS.get(scope["path"])
            if own is not None and scope["method"] in ("GET", "HEAD"):
                await (await own(self))(scope, receive, send)
                return
            # The guards have read it whole.
            body = (await receive()).get("body", b"") if scope["method"] in BODY_METHODS else b""
            async with self._accepted():
                await until_client_leaves(receive, self._forward(scope, body, answer))
        except ClientLeftError:
            return
        except Exception as error:
            await answer.fail(error)

    @asynccontextmanager
    async def _accepted(self) -> AsyncIterator[None]:
        """A request counts as accepted meanwhile; raises UnavailableError if it is not taken, or is cut off."""
        if self._refusal is not None:
            raise UnavailableError(self._refusal)
        deadline = asyncio.timeout(None)
        self._open.add(deadline)
        self._idle.clear()
        try:
            async with deadline:
                yield
        except TimeoutError:
            if deadline.expired():
                raise UnavailableError(self._refusal) from None
            raise
        finally:
            self._open.remove(deadline)
            if not self._open:
                self._idle.set()

    async def _forward(self, scope: Scope, body: bytes, answer: _Answer) -> None:
        tenant = scope["state"]["tenant"]
        request = ForwardedRequest.of(scope["method"], scope["path"], scope["query_string"], body, tenant)
        with await self.keys.ticket(request.path, body) as ticket:
            async with aclosing(self._fleet.respond(request, ticket)) as parts:
                async for part in parts:
                    await answer.give(part)
            await answer.end()

    async def _health(self) -> Response:
        """This process lives; a replica that does not is replaced without anybody's help."""
        return JSONResponse({"status": "ok"})

    async def _ready(self) -> Response:
        """Whether requests are taken."""
        if self._refusal is None and not await self._fleet.ready(_READY_SECONDS):
            raise ApiError(503, "no replica is ready", retry_after=5)
        if self._refusal is not None:
            raise ApiError(503, self._refusal, retry_after=5)
        return JSONResponse({"status": "ok"})

    async def _metrics(self) -> Response:
        """The figures of all replicas, as if they were one server's."""
        return Response(await self._fleet.metrics(), headers={"content-type": CONTENT_TYPE})


_OWN_PATHS = {"/health": Front._health, "/ready": Front._ready, "/metrics": Front._metrics}


class _Answer:
    """What a client is sent, which may break off anywhere."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._start: ResponseStart | None = None

    async def give(self, part: ResponseStart | bytes) -> None:
        """Send a part of a response; raises ClientLeftError if nobody takes it."""
        if isinstance(part, ResponseStart):
            self._start = part
            message: Message = {"type": "http.response.start", "status": part.status, "headers": part.headers}
        else:
            message = {"type": "http.response.body", "body": part, "more_body": True}
        try:
            async with asyncio.timeout(SEND_TIMEOUT):
                await self._send(message)
        except TimeoutError:
            raise ClientLeftError from None

    async def end(self) -> None:
        """Send the end of a response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: Exception) -> None:
        """Send what went wrong: as a response, or as the last event of a stream; another response breaks off."""
        if self._start is None:
            await error_response(as_api_error(error))(self._scope, self._receive, self._send)
        elif dict(self._start.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            await self.give(error_event(error) + LAST_EVENT)
            await self.end()
        else:
            raise error
