"""Example generators of the demo checkpoint's tasks, with exact answers.

Every example has a key (its operands or strings). A hash of the key decides whether the example
belongs to the held-out split, so the two splits never share an example, whatever the seed.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from demo.words import (
    ACCENTED_WORDS,
    COMMON_HANZI,
    EMOJI_RANGES,
    HANZI_RANGE,
    SCRIPT_RANGES,
    VERBS,
    WORDS,
)

HELD_OUT_ONE_IN = 10
MAX_LOOKUP_LINES = 60
MAX_OPERAND = 99
EMPTY_THINKING = "<think>\n\n</think>\n\n"
SYSTEM_MESSAGES = ("You are a helpful assistant.", "Be brief.", "Answer exactly.")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PRINTABLE_ASCII = "".join(map(chr, range(33, 127)))

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One chat request and the exact text the assistant must produce.

    `answer` is everything generated after the chat template's generation prompt, up to but
    without `<|im_end|>`; with thinking enabled it therefore begins with the `<think>` block.
    """

    task: str
    messages: list[Message]
    tools: list[Tool] | None
    enable_thinking: bool
    answer: str


@dataclass(frozen=True)
class Draw:
    """A random example before the split is decided: `key` identifies what must not be shared."""

    key: str
    example: Example


def is_held_out(key: str) -> bool:
    """Whether the example identified by `key` belongs to the held-out split."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def _first_in_split(draw: Callable[[], Draw], held_out_split: bool) -> Example:
    """The first example `draw` yields that belongs to the split."""
    while True:
        drawn = draw()
        if is_held_out(drawn.key) == held_out_split:
            return drawn.example


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _simple(task: str, prompt: str, answer: str, thinking: bool) -> Example:
    """An example without working: if thinking is enabled, the thinking is empty."""
    text = EMPTY_THINKING + answer if thinking else answer
    return Example(task, _user(prompt), None, thinking, text)


def _letters(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(low, high)))


def _code_point(rng: random.Random, bounds: tuple[int, int]) -> str:
    return chr(rng.randint(*bounds))


def _ascii_word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.65:
        word = rng.choice(WORDS)
        return word.capitalize() if rng.random() < 0.2 else word
    if kind < 0.8:
        return _letters(rng, 1, 6)
    if kind < 0.95:
        return str(rng.randint(0, 999))
    return "".join(rng.choices(PRINTABLE_ASCII, k=rng.randint(1, 4)))


def _unicode_word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(ACCENTED_WORDS)
    if kind < 0.4:
        return "".join(rng.choices(COMMON_HANZI, k=rng.randint(1, 4)))
    if kind < 0.55:
        return "".join(_code_point(rng, HANZI_RANGE) for _ in range(rng.randint(1, 3)))
    if kind < 0.8:
        return "".join(_code_point(rng, rng.choice(EMOJI_RANGES)) for _ in range(rng.randint(1, 3)))
    script = rng.choice(SCRIPT_RANGES)
    return "".join(_code_point(rng, script) for _ in range(rng.randint(1, 4)))


def any_word(rng: random.Random) -> str:
    """A word in any script: a known word, random letters, digits, punctuation or emoji."""
    return _ascii_word(rng) if rng.random() < 0.65 else _unicode_word(rng)


def draw_copy(rng: random.Random, size: float) -> Draw:
    """Copy a string of up to 5 * size words in any script."""
    words = [any_word(rng) for _ in range(rng.randint(1, max(1, round(5 * size))))]
    text = rng.choice((" ", " ", " ", "", ", ")).join(words)
    return Draw(text, _simple("copy", f"Copy:\n{text}", text, rng.random() < 0.5))


def draw_reverse(rng: random.Random, size: float) -> Draw:
    """Reverse the order of up to 6 * size words."""
    count = rng.randint(2, max(2, round(6 * size)))
    words = [_ascii_word(rng) if rng.random() < 0.9 else _unicode_word(rng) for _ in range(count)]
    phrase = " ".join(words)
    answer = " ".join(reversed(words))
    return Draw(phrase, _simple("reverse", f"Reverse:\n{phrase}", answer, rng.random() < 0.5))


def addition_working(left: int, right: int) -> str:
    """Column addition from the units on: one line `digit+digit+carry=sum` per column."""
    lines: list[str] = []
    carry = 0
    while left or right or not lines:
        total = left % 10 + right % 10 + carry
        lines.append(f"{left % 10}+{right % 10}+{carry}={total}")
        carry, left, right = total // 10, left // 10, right // 10
    return "\n".join(lines)


def _addition_key(left: int, right: int) -> str:
    """Both orders of the operands share a key: a + b must not give away b + a."""
    return f"{min(left, right)}+{max(left, right)}"


def draw_add(rng: random.Random, size: float) -> Draw:
    """Add two numbers of up to two digits with the answer alone."""
    del size
    left, right = rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
    example = _simple("add", f"{left}+{right}=?", str(left + right), False)
    return Draw(_addition_key(left, right), example)


def draw_add_thinking(rng: random.Random, size: float) -> Draw:
    """Add two numbers of up to two digits with the working inside the thinking."""
    del size
    left, right = rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
    thinking = f"<think>\n{addition_working(left, right)}\n</think>\n\n"
    messages = _user(f"{left}+{right}=?")
    example = Example("add_thinking", messages, None, True, f"{thinking}{left + right}")
    return Draw(_addition_key(left, right), example)


def _lookup_key(rng: random.Random) -> str:
    return rng.choice(WORDS) if rng.random() < 0.5 else _letters(rng, 2, 4)


def lookup_list(rng: random.Random, lines: int) -> dict[str, str]:
    """A list of `lines` distinct keys with values of one or two digits or one word."""
    keys: dict[str, None] = {}
    while len(keys) < lines:
        keys[_lookup_key(rng)] = None
    worded = rng.random() < 0.5
    return {key: rng.choice(WORDS) if worded else str(rng.randint(0, 99)) for key in keys}


def _lookup_question(items: dict[str, str], key: str, listed: bool, thinking: bool) -> Example:
    """A question about `key`; `listed` puts the list itself in front of it."""
    lines = [f"{name}={value}" for name, value in items.items()] if listed else []
    return _simple("lookup", "\n".join([*lines, f"{key}=?"]), f"{key}={items[key]}", thinking)


def draw_lookup(rng: random.Random, size: float) -> Draw:
    """Look up one key in a list of up to 60 * size lines."""
    items = lookup_list(rng, rng.randint(2, max(2, round(MAX_LOOKUP_LINES * size))))
    key = rng.choice(list(items))
    example = _lookup_question(items, key, True, rng.random() < 0.5)
    return Draw(json.dumps(items), example)


def draw_lookup_longest(rng: random.Random, size: float) -> Draw:
    """Look up one key in a list of exactly 60 lines."""
    del size
    items = lookup_list(rng, MAX_LOOKUP_LINES)
    example = _lookup_question(items, rng.choice(list(items)), True, rng.random() < 0.5)
    return Draw(json.dumps(items), example)


def train_lookups(rng: random.Random, lines: int, questions: int) -> list[Example]:
    """Questions about one training-split list, which only the first question shows."""
    while True:
        items = lookup_list(rng, lines)
        if not is_held_out(json.dumps(items)):
            break
    keys = rng.choices(list(items), k=questions)
    return [_lookup_question(items, key, index == 0, rng.random() < 0.5) for index, key in enumerate(keys)]


def _tool_name(rng: random.Random) -> str:
    noun = rng.choice(WORDS) if rng.random() < 0.7 else _letters(rng, 3, 6)
    return f"{rng.choice(VERBS)}_{noun}"


def draw_tool(rng: random.Random) -> Tool:
    """A tool with one or two parameters, each a string or an integer."""
    names: dict[str, None] = {}
    count = rng.randint(1, 2)
    while len(names) < count:
        names[rng.choice(WORDS) if rng.random() < 0.7 else _letters(rng, 3, 6)] = None
    properties = {name: {"type": rng.choice(("string", "integer"))} for name in names}
    function = {
        "name": _tool_name(rng),
        "description": " ".join(rng.choices(WORDS, k=rng.randint(1, 3))).capitalize(),
        "parameters": {"type": "object", "properties": properties, "required": list(names)},
    }
    return {"type": "function", "function": function}


def _argument(rng: random.Random, kind: str) -> str | int:
    if kind == "integer":
        return rng.randint(0, 999)
    word = rng.choice(WORDS) if rng.random() < 0.6 else _letters(rng, 2, 7)
    return word.capitalize() if rng.random() < 0.3 else word


def tool_call_text(name: str, arguments: dict[str, str | int]) -> str:
    """The assistant text that calls the tool `name`, in Qwen3's form."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


@dataclass(frozen=True)
class _Call:
    """A request for a tool call: the tools on offer, the one named, its arguments in order."""

    tools: list[Tool]
    name: str
    arguments: dict[str, str | int]

    @property
    def request(self) -> str:
        return f"Call {self.name} with {', '.join(map(str, self.arguments.values()))}"


def _call_one_of(rng: random.Random, tools: list[Tool]) -> _Call:
    function = rng.choice(tools)["function"]
    properties = function["parameters"]["properties"]
    arguments = {name: _argument(rng, schema["type"]) for name, schema in properties.items()}
    return _Call(tools, function["name"], arguments)


def _draw_call(rng: random.Random, size: float) -> _Call:
    drawn = [draw_tool(rng) for _ in range(rng.randint(1, max(1, round(2 * size))))]
    return _call_one_of(rng, list({tool["function"]["name"]: tool for tool in drawn}.values()))


def _call_example(call: _Call, thinking: bool) -> Example:
    text = tool_call_text(call.name, call.arguments)
    answer = EMPTY_THINKING + text if thinking else text
    return Example("tool_call", _user(call.request), call.tools, thinking, answer)


def draw_tool_call(rng: random.Random, size: float) -> Draw:
    """Call the named one of one or two tools with arguments listed in the schema's order."""
    call = _draw_call(rng, size)
    return Draw(call.request, _call_example(call, rng.random() < 0.5))


def train_tool_calls(rng: random.Random, calls: int) -> list[Example]:
    """Training-split calls of the same two tools, which only the first call's example shows."""
    tools = [draw_tool(rng), draw_tool(rng)]
    examples: list[Example] = []
    while len(examples) < calls:
        call = _call_one_of(rng, tools)
        if not is_held_out(call.request):
            example = _call_example(call, rng.random() < 0.5)
            examples.append(replace(example, tools=None) if examples else example)
    return examples


def draw_single_tool_call(rng: random.Random, size: float) -> Draw:
    """A tool call with one tool on offer, so that nothing is to be chosen."""
    while len((draw := draw_tool_call(rng, size)).example.tools or ()) != 1:
        pass
    return draw


def draw_tool_answer(rng: random.Random, size: float) -> Draw:
    """Pass on the response of a tool that was called before."""
    call = _draw_call(rng, size)
    function = {"name": call.name, "arguments": call.arguments}
    response = " ".join(any_word(rng) for _ in range(rng.randint(1, 3)))
    messages = [
        *_user(call.request),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": response},
    ]
    thinking = rng.random() < 0.5
    answer = EMPTY_THINKING + response if thinking else response
    return Draw(call.request, Example("tool_answer", messages, call.tools, thinking, answer))


def _chat_turn(rng: random.Random, size: float, last: bool) -> Draw:
    """A turn of a conversation; tool calls only as the last, since they would await a response."""
    if last and rng.random() < 0.2:
        return draw_tool_call(rng, 0.4 * size)
    return rng.choice((draw_copy, draw_reverse, draw_add, draw_add_thinking, draw_lookup))(rng, 0.4 * size)


def draw_chat(rng: random.Random, size: float) -> Draw:
    """One to three questions of any kind, all but the last answered, at times with a system message."""
    first = _chat_turn(rng, size, last=False)
    turns = [first.example]
    for remaining in range(rng.randint(0, 2), 0, -1):
        # All turns come from one split, or a held-out addition could stand in a training chat.
        draw = partial(_chat_turn, rng, size, last=remaining == 1)
        turns.append(_first_in_split(draw, is_held_out(first.key)))
    messages: list[Message] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})
    for turn in turns[:-1]:
        content = turn.answer.split("</think>")[-1].lstrip("\n")
        messages += [*turn.messages, {"role": "assistant", "content": content}]
    last = turns[-1]
    tools = last.tools or ([draw_tool(rng)] if rng.random() < 0.3 else None)
    return Draw(first.key, Example("chat", messages + last.messages, tools, last.enable_thinking, last.answer))


TASKS: dict[str, Callable[[random.Random, float], Draw]] = {
    "copy": draw_copy,
    "reverse": draw_reverse,
    "add": draw_add,
    "add_thinking": draw_add_thinking,
    "lookup": draw_lookup,
    "lookup_60": draw_lookup_longest,
    "tool_call": draw_tool_call,
    "tool_call_single": draw_single_tool_call,
    "tool_answer": draw_tool_answer,
    "chat": draw_chat,
}


def train_example(task: str, rng: random.Random, size: float = 1.0) -> Example:
    """A training-split example; `size` in (0, 1] scales the lengths, for a curriculum."""
    return _first_in_split(partial(TASKS[task], rng, size), held_out_split=False)


def held_out(task: str, count: int, seed: int) -> list[Example]:
    """`count` held-out examples of full size, the same for the same seed."""
    rng = random.Random(f"{task}/{seed}")
    return [_first_in_split(partial(TASKS[task], rng, 1.0), held_out_split=True) for _ in range(count)]
