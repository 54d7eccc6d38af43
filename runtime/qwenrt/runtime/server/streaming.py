"""Server-sent events, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import as_api_error, error_body

Result = TypeVar("Result")

SEND_TIMEOUT = 60.0
"""Seconds in which a client must take what it is sent, or is taken to have left."""


class ClientLeftError(Exception):
    """The client closed its connection before the answer."""


class EventStream(Response):
    """Chunks as server-sent events, in OpenAI's manner: an error is an event too, and `[DONE]` comes last.

    A chunk with a `type` is an event of that name.

    close: called when it is over, whether the client stayed or not, and even if nothing was sent.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[BaseModel], close: Callable[[], None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._chunks = chunks
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream as an ASGI application."""
        try:
            await until_client_leaves(receive, self._send_all(send))
        except (ClientLeftError, TimeoutError):
            return
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in _events(self._chunks):
            async with asyncio.timeout(SEND_TIMEOUT):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(chunks: AsyncIterator[BaseModel]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            kind = getattr(chunk, "type", None)
            name = b"" if kind is None else f"event: {kind}\n".encode()
            yield name + _event(chunk.model_dump_json(exclude_unset=True))
    except Exception as error:
        yield error_event(error)
    yield LAST_EVENT


def error_event(error: Exception) -> bytes:
    """What a stream says of the exception that ends it."""
    return _event(error_body(as_api_error(error)).model_dump_json())


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


LAST_EVENT = _event("[DONE]")


async def until_client_leaves(receive: Receive, work: Coroutine[None, None, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves; raises ClientLeftError then.

    receive: that of a request whose body was read.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
