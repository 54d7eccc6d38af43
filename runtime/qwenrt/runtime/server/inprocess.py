"""The server's application called from inside the process: its requests and responses without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

Headers = list[tuple[bytes, bytes]]

_JSON: Headers = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """What comes before a response's body."""

    status: int
    headers: Headers


async def stream_response(
    app: ASGIApp, method: str, path: str, body: bytes = b"", *, query: bytes = b"", tenant: str = ""
) -> AsyncGenerator[ResponseStart | bytes]:
    """Send a request; yields the start of the response and then its body in pieces.

    body: JSON. Closing the generator is the client leaving. A reader that is slower than the application gets more at once.
    """
    news: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()
    request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if request:
            return request.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(method, path, query, tenant), receive, news.put)
        finally:
            news.put_nowait(None)

    task = asyncio.ensure_future(run())
    try:
        while (message := await news.get()) is not None:
            if message["type"] == "http.response.start":
                yield ResponseStart(message["status"], list(message["headers"]))
                continue
            pieces = [message.get("body", b"")]
            while not news.empty():
                message = news.get_nowait()
                if message is None:
                    news.put_nowait(None)
                    break
                pieces.append(message.get("body", b""))
            if data := b"".join(pieces):
                yield data
    finally:
        left.set()
        # What the application raises it has answered and logged. Whoever is cancelled here once more does not cancel it.
        await asyncio.shield(asyncio.gather(task, return_exceptions=True))


async def whole_response(app: ASGIApp, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send a request; returns the response's status and body. Cancelling is the client leaving."""
    status, pieces = 0, []
    async for part in stream_response(app, method, path, body):
        if isinstance(part, ResponseStart):
            status = part.status
        else:
            pieces.append(part)
    return status, b"".join(pieces)


def _scope(method: str, path: str, query: bytes, tenant: str) -> Message:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": _JSON,
        "client": None,
        "server": None,
        "state": {"tenant": tenant},
    }
