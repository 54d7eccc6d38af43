"""Which tools the model is shown, and the grammar that makes it call them where it must."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from qwenrt.plugins import RequestError

from ..sampling.structured import StructuredOutputsParams, json_rule, literal
from .chat_protocol import ChatCompletionRequest, NamedToolChoice, Tool
from .tool_calls import BEGIN, END


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request's tools come to."""

    shown: list[Tool] | None
    """Tools that the template gets; None: the answer is not searched for calls."""
    form: StructuredOutputsParams | None
    """The form of the answer, the request's own where tools ask for none."""


def tool_use(body: ChatCompletionRequest, form: StructuredOutputsParams | None) -> ToolUse:
    """Apply tool_choice, parallel_tool_calls and strict; `form` is what the request asks of an answer without calls.

    Raises RequestError if the fields contradict each other.
    """
    choice, tools = body.tool_choice, body.tools or []
    if not tools:
        if choice not in (None, "none"):
            raise RequestError("tool_choice needs tools")
        return ToolUse(None, form)
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError(f"tools has two functions of one name among {', '.join(names)[:200]}; names must differ")
    if choice == "none":
        return ToolUse(None, form)
    if isinstance(choice, NamedToolChoice):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise RequestError(f"tool_choice names the function {choice.function.name!r}, which tools does not have")
        return ToolUse(tools, _grammar("start: call", named))
    if choice == "required":
        more = "" if body.parallel_tool_calls is False else ' ("\\n" call)*'
        return ToolUse(tools, _grammar(f"start: call{more}", tools))
    if form is not None:
        return ToolUse(tools, _grammar(f'start: call ("\\n" call)* | answer\n{_renamed(form.source)}', tools))
    if any(tool.function.strict for tool in tools):
        return ToolUse(tools, _grammar("start: called* TEXT\ncalled: trigger rest\n" + _FREE, tools))
    return ToolUse(tools, None)


_FREE = f"trigger[lazy]: TEXT {literal(BEGIN)}\nTEXT: /(.|\\n)*/"
"""Text up to the first tag."""


def _renamed(source: str) -> str:
    """The form's rule `start` under the name `answer`."""
    if not source.startswith("start: ") or "\n" in source:
        raise RequestError(
            "a grammar of one's own cannot be combined with tools; give a JSON schema, or tool_choice none"
        )
    return "answer: " + source.removeprefix("start: ")


def _grammar(start: str, tools: Sequence[Tool]) -> StructuredOutputsParams:
    """A grammar in which `call` is a call of one of the tools, and `rest` is that without its opening tag."""
    rules = [start, f"call: {literal(BEGIN)} rest", f'rest: "\\n" body {literal(chr(10) + END)}']
    rules.append("body: " + " | ".join(f"body_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        function = tool.function
        head = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": '
        rules.append(f'body_{index}: {literal(head)} arguments_{index} "}}"')
        schema = {"type": "object"} if function.parameters is None else function.parameters
        rules.append(json_rule(schema, f"arguments_{index}"))
    return StructuredOutputsParams(grammar="\n".join(rules))
