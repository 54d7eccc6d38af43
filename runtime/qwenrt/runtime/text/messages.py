"""The messages of a conversation, checked before a template sees them: many templates drop silently what they do not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qwenrt.plugins import RequestError

ROLES = ("system", "user", "assistant", "tool")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text contents and without keys that are None; raises RequestError naming the message that is wrong."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is a {type(messages).__name__}; it must be a list of messages")
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as JSON objects; raises RequestError naming the one that is not."""
    if tools is None:
        return None
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise RequestError(f"tools is a {type(tools).__name__}; it must be a list of tools")
    return [_object(f"tools[{index}]", tool) for index, tool in enumerate(tools)]


def _message(where: str, message: object) -> dict[str, Any]:
    checked = {key: value for key, value in _object(where, message).items() if value is not None}
    role = checked.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role is {str(role)[:40]!r}; it must be one of {', '.join(ROLES)}")
    if "tool_calls" in checked:
        checked["tool_calls"] = _tool_calls(f"{where}.tool_calls", role, checked["tool_calls"])
    if not isinstance(checked.get("reasoning_content", ""), str):
        raise RequestError(
            f"{where}.reasoning_content is a {type(checked['reasoning_content']).__name__}; it must be a string"
        )
    checked["content"] = _content(f"{where}.content", checked.get("content"), may_lack=bool(checked.get("tool_calls")))
    return checked


def _content(where: str, content: object, *, may_lack: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_lack:
        return ""
    if not isinstance(content, list | tuple):
        found = "missing or null" if content is None else f"a {type(content).__name__}"
        raise RequestError(f"{where} is {found}; it must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        part = _object(f"{where}[{index}]", part)
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = str(part.get("type"))[:40]
            raise RequestError(f"{where}[{index}] is a part of type {kind!r}; it must be of type text and have a text")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(where: str, role: object, calls: object) -> list[dict[str, Any]]:
    if role != "assistant":
        raise RequestError(f"{where} belongs to a message of {role}; only an assistant calls tools")
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where} is a {type(calls).__name__}; it must be a list of tool calls")
    checked = [_object(f"{where}[{index}]", call) for index, call in enumerate(calls)]
    for index, call in enumerate(checked):
        function = _object(f"{where}[{index}].function", call.get("function", call))
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), str | dict):
            raise RequestError(f"{where}[{index}] must have a name (a string) and arguments (a string or an object)")
    return checked


def _object(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} is a {type(value).__name__}; it must be an object")
    for key in value:
        if not isinstance(key, str):
            raise RequestError(f"{where} has the key {str(key)[:40]!r}; keys must be strings")
    return dict(value)
