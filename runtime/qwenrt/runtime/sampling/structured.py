"""What form an answer must have: a JSON schema, a regular expression, a choice or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qwenrt.plugins import RequestError

MAX_SOURCE_CHARS = 192 << 10
"""Longest schema, pattern, list of choices or grammar."""
_JSON_OPTIONS: dict[str, Any] = {
    # Without a bound, a model that has nothing to say writes blanks for ever.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}",
    "coerce_one_of": True,
}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an answer: give one of the fields. A RequestError says what is wrong with it.

    All of the answer has that form, or the start of it where max_tokens or a stop string cuts it; a thinking block before the
    answer is left alone. JSON is written without escapes that it does not need.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, as an object or as JSON text. `oneOf` is taken as `anyOf`; what llguidance cannot enforce is refused."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression in Rust's syntax, without look-around and back references."""
    choice: Sequence[str] | None = None
    """The answer is one of these."""
    grammar: str | None = None
    """A context-free grammar in llguidance's variant of Lark's syntax, from its rule `start`."""
    source: str = field(init=False, default="")
    """The form as such a grammar."""

    def __post_init__(self) -> None:
        sources = {
            "json": None if self.json is None else json_rule(_parsed(self.json)),
            "json_object": json_rule({"type": "object"}) if self.json_object else None,
            "regex": None if self.regex is None else f"start: {_pattern(self.regex)}",
            "choice": None if self.choice is None else f"start: {_alternatives(self.choice)}",
            "grammar": None if self.grammar is None else _text("grammar", self.grammar),
        }
        given = [name for name, source in sources.items() if source is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give one of {', '.join(sources)}"
            )
        source = sources[given[0]]
        assert source is not None
        if len(source) > MAX_SOURCE_CHARS:
            raise RequestError(f"{given[0]} has {len(source)} characters; it may have {MAX_SOURCE_CHARS}")
        object.__setattr__(self, "source", source)


def json_rule(schema: Any, name: str = "start") -> str:
    """A rule of a grammar for JSON that fits `schema`; raises RequestError if that is no JSON schema."""
    if not isinstance(schema, Mapping | bool):
        raise RequestError(f"the JSON schema is a {type(schema).__name__}; it must be an object")
    if schema is not False:
        schema = {**({} if schema is True else schema), "x-guidance": _JSON_OPTIONS}
    try:
        return f"{name}: %json {json.dumps(schema, ensure_ascii=False, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is no JSON: {str(error)[:200]}") from None


def literal(text: str) -> str:
    """A term of a grammar for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def _parsed(schema: Any) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is no JSON: {error}") from None


def _pattern(regex: object) -> str:
    """The term for a regular expression; the slash ends it, so the pattern's own are escaped."""
    escaped, backslash = [], False
    for char in _text("regex", regex):
        if char == "\n":
            escaped.append("n" if backslash else "\\n")
        else:
            escaped.append("\\/" if char == "/" and not backslash else char)
        backslash = char == "\\" and not backslash
    if backslash:
        raise RequestError("regex ends with a backslash; write two for the character itself")
    return f"/{''.join(escaped)}/"


def _alternatives(choice: object) -> str:
    if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
        raise RequestError("choice must be a list of at least one string")
    return " | ".join(literal(_text("an entry of choice", entry)) for entry in choice)


def _text(name: str, value: object) -> str:
    """`value` if it is a non-empty text that UTF-8 can express."""
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} must be a string of at least one character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} has a lone surrogate; it must be valid Unicode") from None
    return value
