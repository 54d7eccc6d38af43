"""One streamed completion over HTTP, and when each part of it came."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any

import httpx

from qwenrt.plugins import QwenrtError

from .load import Work
from .trace import Trace

_MOST_LINE_BYTES = 1 << 20


class Client:
    """Requests to one server; `base_url` is what the openai client takes, ending in /v1."""

    def __init__(
        self, base_url: str, *, api_key: str | None, model: str | None, connections: int, timeout: float
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(
            base_url=base_url.rstrip("/") + "/", headers=headers, limits=limits, timeout=timeout
        )
        self._model = model

    async def __aenter__(self) -> Client:
        if self._model is None:
            self._model = await self._only_model()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _only_model(self) -> str:
        try:
            answer = await self._http.get("models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise QwenrtError(
                f"{self._http.base_url}models names no model ({type(error).__name__}: {error}); start the server, or give --model"
            ) from None

    async def complete(self, work: Work) -> Trace:
        """Send a request and read its whole answer; a failure is in the trace, not raised."""
        trace = Trace(perf_counter())
        body = {
            "model": self._model,
            "prompt": work.prompt,
            "max_tokens": work.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._http.stream("POST", "completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    trace.error = f"status {response.status_code}: {text[:200]}"
                else:
                    await _read(response, trace)
        except (httpx.HTTPError, ValueError) as error:
            trace.error = f"{type(error).__name__}: {error}"
        trace.ended = perf_counter()
        return trace


async def _read(response: httpx.Response, trace: Trace) -> None:
    async for event in _events(response):
        if error := event.get("error"):
            trace.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        if any(choice.get("text") for choice in event.get("choices", ())):
            trace.arrivals.append(perf_counter())
        if usage := event.get("usage"):
            trace.prompt_tokens = int(usage["prompt_tokens"])
            trace.completion_tokens = int(usage["completion_tokens"])
            trace.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    if not trace.completion_tokens:
        trace.error = "the answer ended without usage"


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event up to [DONE]."""
    async for line in response.aiter_lines():
        if len(line) > _MOST_LINE_BYTES:
            raise ValueError(f"an event of more than {_MOST_LINE_BYTES} bytes")
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError(f"an event that is no object: {data[:80]}")
            yield event
