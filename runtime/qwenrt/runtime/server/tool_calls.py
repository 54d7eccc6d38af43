"""Hermes-style tool calls, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, found in an answer while it comes."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .reasoning import partial_suffix

BEGIN = "<tool_call>"
END = "</tool_call>"

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
"""What models write before the arguments; a call in any other order is read once it is whole."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of a call; the first news of each has its id and name."""

    index: int
    arguments: str
    """JSON, piece by piece."""
    id: str | None = None
    name: str | None = None


Piece = str | ToolCallDelta
"""Text of the answer, or of a call."""


class ToolCallParser:
    """Takes tool calls out of an answer; how the text is cut into pieces makes no difference.

    `</tool_call>` in a string of the arguments does not end a call. A call that is cut off within its arguments stays a call
    with the arguments so far; what has no name or is no JSON object stays text. Blanks around calls belong to nothing.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""
        self._blanks = ""
        """What stood before the tag of the call that is being read."""
        self._after_call = False
        self._call: _Call | None = None

    def push(self, text: str) -> list[Piece]:
        """More text; returns what is new."""
        self._held += text
        pieces: list[Piece] = []
        more = True
        while more:
            new, more = self._read_text() if self._call is None else self._read_call(self._call)
            pieces += new
        return _joined(pieces)

    def finish(self) -> list[Piece]:
        """The text ends here; returns what was held back."""
        call, held = self._call, self._held
        self._call, self._held = None, ""
        if call is None:
            return _joined([] if self._after_call and held.isspace() else [held])
        if not call.announced:
            return _joined([self._blanks + BEGIN + call.text + held])
        return _joined([self._news(call, call.feed(held))])

    def _read_text(self) -> tuple[list[Piece], bool]:
        """What is new of the text, and whether a call follows."""
        if self._after_call:
            self._held = self._held.lstrip()
        text, tag, rest = self._held.partition(BEGIN)
        end = len(text) if tag else len(text) - partial_suffix(text, BEGIN)
        # Blanks at the end may turn out to stand before a call.
        end = len(text[:end].rstrip())
        self._after_call = self._after_call and not end
        if tag:
            self._blanks, self._held, self._call = text[end:], rest, _Call()
        else:
            self._held = text[end:]
        return [text[:end]], bool(tag)

    def _read_call(self, call: _Call) -> tuple[list[Piece], bool]:
        """What is new of the call, and whether anything can follow it."""
        if not call.begun:
            first = self._held.lstrip()[:1]
            if not first:
                return [], False
            if first != "{":
                self._call, self._after_call = None, False
                return [self._blanks + BEGIN], True
            call.begun = True
        arguments, ended = self._feed(call)
        pieces: list[Piece] = []
        if call.announced:
            pieces = [self._news(call, arguments)]
        if ended:
            if not call.announced:
                pieces = [self._whole(call)]
            self._call, self._after_call = None, isinstance(pieces[0], ToolCallDelta)
        return pieces, ended

    def _feed(self, call: _Call) -> tuple[str, bool]:
        """Give the call what belongs to it; returns what is new of its arguments, and whether it ended."""
        arguments, held = "", self._held
        while True:
            before, tag, after = held.partition(END)
            if not tag:
                end = len(held) - partial_suffix(held, END)
                self._held = held[end:]
                return arguments + call.feed(held[:end]), False
            arguments += call.feed(before)
            if not call.in_string:
                self._held = after
                return arguments, True
            arguments += call.feed(END)
            held = after

    def _news(self, call: _Call, arguments: str) -> ToolCallDelta:
        if call.index is not None:
            return ToolCallDelta(call.index, arguments)
        call.index = self.num_calls
        return self._first(call.name, arguments)

    def _first(self, name: str, arguments: str) -> ToolCallDelta:
        self.num_calls += 1
        return ToolCallDelta(self.num_calls - 1, arguments, f"call_{uuid.uuid4().hex[:24]}", name)

    def _whole(self, call: _Call) -> Piece:
        """A call that was not announced, now that all of it is there."""
        parsed = _parsed(call.text)
        if parsed is None:
            return self._blanks + BEGIN + call.text + END
        return self._first(*parsed)


class _Call:
    """The JSON of a call while it comes."""

    def __init__(self) -> None:
        self.begun = False
        self.text = ""
        """All of it so far, until the call is announced."""
        self.name = ""
        self.index: int | None = None
        """Its number, once it is given out."""
        self.announced = False
        """Whether its name is known and its arguments have begun."""
        self.in_string = False
        self._escaped = False
        self._depth = 0
        self._nested = False
        self._complete = False

    def feed(self, text: str) -> str:
        """Take more of it; returns what is new of the arguments."""
        arguments = []
        for place, char in enumerate(text):
            if self.in_string:
                self.in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self.in_string = True
            elif char in "{[":
                self._depth += 1
                if self._depth == 2 and not self._nested:
                    self._nested = True
                    self._announce(self.text + text[:place])
            elif char in "}]":
                self._depth -= 1
            if self.announced and not self._complete:
                arguments.append(char)
                self._complete = self._depth == 1
        if not self.announced:
            self.text += text
        return "".join(arguments)

    def _announce(self, head: str) -> None:
        """Announce the call if all before its first inner bracket is what stands before arguments."""
        match = _HEAD.fullmatch(head)
        name = _json(match[1]) if match else None
        if isinstance(name, str):
            self.name, self.announced = name, True


def _json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _parsed(text: str) -> tuple[str, str] | None:
    """Name and arguments of a whole call; None if it is none."""
    call = _json(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments")
    if arguments is None:
        arguments = {}
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces without empty texts, neighbouring texts as one."""
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            if piece.arguments or piece.id:
                joined.append(piece)
        elif piece and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        elif piece:
            joined.append(piece)
    return joined
