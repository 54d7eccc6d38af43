"""What every request passes before it is read: the API key, and bounds on its body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, error_response

MAX_BODY_BYTES = 4 << 20
MAX_BODIES_BYTES = 256 << 20
"""Of all requests that are being served."""
BODY_TIMEOUT = 60.0
"""Seconds in which a body must have arrived."""
BODY_METHODS = ("POST", "PUT", "PATCH")
"""Of requests whose body is read."""
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/openapi.json"})
"""Paths that need no key; none tells what anybody asked."""


class KeyCheck:
    """Refuses requests without one of the API keys, where there are any; the request's tenant is then the key's number."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request as an ASGI application."""
        if scope["type"] == "http":
            tenant = self._tenant(scope)
            if tenant is None and scope["path"] not in OPEN_PATHS:
                error = ApiError(401, "give a valid API key: Authorization: Bearer KEY", code="invalid_api_key")
                await error_response(error)(scope, receive, send)
                return
            scope["state"] = {**scope.get("state", {}), "tenant": tenant or ""}
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str | None:
        """The number of the request's key; nothing if it has none of ours. Compares all keys, in constant time."""
        if not self._digests:
            return ""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return str(matches.index(True)) if kind.lower() == b"bearer" and any(matches) else None


class BodyCheck:
    """Reads bodies, which must be JSON and bounded in size, in all and in time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request as an ASGI application."""
        if scope["type"] != "http" or scope["method"] not in BODY_METHODS:
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            try:
                whole = await self._read(scope, receive, body)
            except ApiError as error:
                response = error_response(error)
                # What was not read cannot be told from a next request.
                response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
            if whole:
                await self._app(scope, _Replay(bytes(body), receive), send)
        finally:
            self._held -= len(body)

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> bool:
        """Fill `body`; returns False if the client left, raises ApiError if it must not be read."""
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            # Also keeps web pages of others from posting here: browsers ask before they send JSON elsewhere.
            raise ApiError(415, "the body must be JSON: Content-Type: application/json")
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    self._take(body, message.get("body", b""))
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT:g} s") from None

    def _take(self, body: bytearray, piece: bytes) -> None:
        if len(body) + len(piece) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes; shorten it")
        if self._held + len(piece) > MAX_BODIES_BYTES:
            raise ApiError(
                429, "the server holds too many large requests; try again", code="rate_limit_exceeded", retry_after=5
            )
        body += piece
        self._held += len(piece)


class _Replay:
    """A `receive` that gives a body that was read already, and then what comes."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
