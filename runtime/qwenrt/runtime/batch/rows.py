"""The input of a batch job: lines of JSON in OpenAI's batch format, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..server.middleware import MAX_BODY_BYTES

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""What a row may ask for."""
MAX_LINE_BYTES = MAX_BODY_BYTES + (64 << 10)
MAX_CUSTOM_ID_CHARS = 512


@dataclass(slots=True)
class Row:
    """A line of the input: a request, or what is wrong with it."""

    line: int
    """Its number, from 1."""
    size: int
    """Bytes that the line has in the input."""
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    """The request, as JSON."""
    prefix: str = ""
    """Rows whose prompts begin alike are neighbours when they are sorted by this."""
    code: str | None = None
    """Which kind of error makes it no request; None: it is one."""
    message: str = ""
    attempts: int = 0
    """How many workers were lost while they had it."""

    @property
    def key(self) -> bytes:
        """What identifies the row in input and output: its custom_id; its line number if it is no request."""
        if self.code is not None:
            return b"line %d" % self.line
        return custom_id_key(self.custom_id or "")


def custom_id_key(custom_id: str) -> bytes:
    """The `key` of the request with this custom_id."""
    return b"id " + custom_id.encode("utf-8", "surrogatepass")


class RowReader:
    """The rows of an input file in order, one at a time. A line that is no request is a row with a `code`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Row]:
        with self.path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                whole = len(line) <= MAX_LINE_BYTES or line.endswith(b"\n")
                size = len(line) if whole else len(line) + _skip_line(file)
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                row = Row(number, size)
                if not whole:
                    row.code, row.message = "line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes"
                    yield row
                elif line.strip():
                    _parse(line, row)
                    yield row


def _skip_line(file: BinaryIO) -> int:
    """Read on to the end of the line; returns how many bytes that were."""
    size = 0
    while piece := file.readline(1 << 20):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


def _parse(line: bytes, row: Row) -> None:
    """Fill a row with what its line says."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        row.code, row.message = "invalid_json_line", f"the line is not JSON: {error}"
        return
    if not isinstance(data, dict):
        row.code, row.message = "invalid_json_line", f"the line is a JSON {type(data).__name__}; it must be an object"
        return
    custom_id = data.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        row.code = "missing_custom_id" if custom_id is None else "invalid_custom_id"
        row.message = f"custom_id must be text of 1 to {MAX_CUSTOM_ID_CHARS} characters"
        return
    row.custom_id = custom_id
    method, url, body = data.get("method", "POST"), data.get("url"), data.get("body")
    if method != "POST":
        row.code, row.message = "invalid_method", f"method is {_short(method)}; it must be 'POST'"
    elif url not in URLS:
        row.code, row.message = "invalid_url", f"url is {_short(url)}; it must be one of {', '.join(URLS)}"
    elif not isinstance(body, dict):
        row.code, row.message = "invalid_body", "body must be a JSON object: the request"
    elif body.get("stream"):
        row.code, row.message = "invalid_body", "body.stream is true; a batch has whole answers, leave it out"
    else:
        row.url = url
        row.body = json.dumps(body, separators=(",", ":")).encode()
        row.prefix = _prefix(url, body)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _prefix(url: str, body: dict[str, Any]) -> str:
    """Tools come first: chat templates put them before the conversation."""
    prompt = body.get("messages") or body.get("prompt") or body.get("input")
    return url + json.dumps([body.get("tools"), prompt], separators=(",", ":"))[:4096]
