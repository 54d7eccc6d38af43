"""The other side of `qwenrt chat --url`: an OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import fields
from typing import Any

import httpx

from qwenrt.plugins import QwenrtError, RequestError
from qwenrt.runtime import SamplingParams

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


class RemotePartner:
    """Answers by streamed chat completions; what a server's reasoning parser took out is put back between <think> tags.

    Raises QwenrtError if the server is not there or names no model.
    """

    def __init__(self, url: str, *, model: str | None, api_key: str | None, params: SamplingParams) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url.rstrip("/") + "/", headers=headers, timeout=_TIMEOUT)
        # Only what differs from the defaults, so that a server without these extensions can be talked to.
        usual = SamplingParams()
        self._params = {
            field.name: _plain(getattr(params, field.name))
            for field in fields(params)
            if getattr(params, field.name) != getattr(usual, field.name)
        }
        self._model = model or self._first_model()

    def _first_model(self) -> str:
        try:
            answer = self._http.get("models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise QwenrtError(
                f"{self._http.base_url}models names no model ({type(error).__name__}: {error}); start the server, or give --model"
            ) from None

    def answer(self, messages: list[dict[str, str]], thinking: bool | None) -> Generator[str, None, None]:
        """The answer to a conversation, piece by piece; closing the iterator ends the request."""
        body = {"model": self._model, "messages": messages, "stream": True, **self._params}
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        try:
            with self._http.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise RequestError(f"the server answered {response.status_code}: {_message(response.read())}")
                yield from _pieces(response)
        except (httpx.HTTPError, json.JSONDecodeError, LookupError) as error:
            raise RequestError(f"the answer broke off ({type(error).__name__}: {error})") from None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")


def _pieces(response: httpx.Response) -> Iterator[str]:
    thinking = False
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise RequestError(f"the server ended the answer: {_message(data.encode())}")
        for choice in event["choices"]:
            delta = choice["delta"]
            if reasoning := delta.get("reasoning_content"):
                yield reasoning if thinking else f"<think>\n{reasoning.lstrip(chr(10))}"
                thinking = True
            if content := delta.get("content"):
                yield f"\n</think>\n\n{content}" if thinking else content
                thinking = False
