"""Thinking and tool calls in an answer's text, however it is cut (CASES V03, V04)."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwenrt.runtime.server.reasoning import ReasoningParser
from qwenrt.runtime.server.tool_calls import ToolCallDelta, ToolCallParser
from qwenrt.runtime.text.thinking import Thinking

Calls = list[tuple[str | None, str]]


def split(text: str, thinking: Thinking, cuts: list[int]) -> tuple[str, str]:
    parser = ReasoningParser(thinking)
    parts = [parser.push(piece) for piece in pieces(text, cuts)] + [parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def calls(text: str, cuts: list[int]) -> tuple[str, Calls]:
    """The text and the calls (name, arguments) that a parser makes of an answer cut at `cuts`."""
    parser = ToolCallParser()
    content, found = "", {}
    for piece in [one for part in pieces(text, cuts) for one in parser.push(part)] + parser.finish():
        if isinstance(piece, str):
            content += piece
        elif piece.id is not None:
            assert piece.index == len(found)
            found[piece.index] = (piece.name, piece.arguments)
        else:
            name, arguments = found[piece.index]
            found[piece.index] = (name, arguments + piece.arguments)
    return content, list(found.values())


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "answer"),
    [
        ("<think>\na\nb\n</think>\n\nanswer\n", Thinking.POSSIBLE, "a\nb", "answer\n"),
        ("<think>\n\n</think>\n\nanswer", Thinking.POSSIBLE, "", "answer"),
        ("a\n</think>\n\nanswer", Thinking.OPEN, "a", "answer"),
        ("answer", Thinking.NONE, "", "answer"),
        ("answer", Thinking.POSSIBLE, "", "answer"),
        ("\n<think>no block</think>", Thinking.POSSIBLE, "", "\n<think>no block</think>"),
        ("see <think> and </think>", Thinking.NONE, "", "see <think> and </think>"),
        ("<think>cut off\n</th", Thinking.POSSIBLE, "cut off\n</th", ""),
        ("<think>cut off\n\n", Thinking.POSSIBLE, "cut off", ""),
        ("<thi", Thinking.POSSIBLE, "", "<thi"),
        ("<think>a</think>b</think>c", Thinking.POSSIBLE, "a", "b</think>c"),
        ("<think>a < b </thin k></think>c", Thinking.POSSIBLE, "a < b </thin k>", "c"),
        ("", Thinking.OPEN, "", ""),
    ],
)
def test_thinking_is_split_off_whatever_the_pieces(text: str, thinking: Thinking, reasoning: str, answer: str) -> None:
    assert split(text, thinking, []) == (reasoning, answer)
    assert split(text, thinking, list(range(len(text)))) == (reasoning, answer)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</think", "\n", "a", "🙂"]), max_size=8).map("".join),
    st.sampled_from(list(Thinking)),
    st.lists(st.integers(0, 60)),
)
def test_how_thinking_is_cut_makes_no_difference(text: str, thinking: Thinking, cuts: list[int]) -> None:
    assert split(text, thinking, cuts) == split(text, thinking, [])


def call(name: str, **arguments: object) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (call("w", t="a </tool_call> b"), "", [("w", '{"t": "a </tool_call> b"}')]),
        (call("a", x=1) + "\n" + call("b", y=[{"z": "}"}]), "", [("a", '{"x": 1}'), ("b", '{"y": [{"z": "}"}]}')]),
        ("Let me see.\n\n" + call("w", t="+1"), "Let me see.", [("w", '{"t": "+1"}')]),
        (call("w", t='🙂 \\ " {') + "\nand then", "and then", [("w", '{"t": "🙂 \\\\ \\" {"}')]),
        ('<tool_call>{"arguments": {"a": {}}, "name": "w"}</tool_call>', "", [("w", '{"a": {}}')]),
        ('<tool_call>{"name": "w"}</tool_call>', "", [("w", "{}")]),
        ('<tool_call>{"name": "w", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("w", '{"a": 1}')]),
        ('<tool_call>{"name": "w", "arguments": {"a": 1</tool_call>ok', "ok", [("w", '{"a": 1')]),
        ('<tool_call>{"name": "w", "arguments": {"a": "cut', "", [("w", '{"a": "cut')]),
        ('<tool_call>{"name": "w", "arguments": {"a": "</tool_c', "", [("w", '{"a": "</tool_c')]),
        ('<tool_call>{"name": "w", "arguments": {"a": 1}}', "", [("w", '{"a": 1}')]),
        ('x <tool_call>{"na', 'x <tool_call>{"na', []),
        ("x <tool_call> none </tool_call>", "x <tool_call> none </tool_call>", []),
        ("<tool_call>{'name': 'w'}</tool_call>", "<tool_call>{'name': 'w'}</tool_call>", []),
        ("<tool_call>x" + call("w"), "<tool_call>x", [("w", "{}")]),
        ("a <tool b> c  ", "a <tool b> c  ", []),
        ("ends with <tool", "ends with <tool", []),
    ],
)
def test_tool_calls_are_found_whatever_the_pieces(text: str, content: str, expected: Calls) -> None:
    assert calls(text, []) == (content, expected)
    assert calls(text, list(range(len(text)))) == (content, expected)


@given(
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name": "f", ',
                '"arguments": ',
                "{",
                "}",
                '"',
                "\\",
                " ",
                "\n",
                "<",
                "a",
                "[",
                "]",
                "}}",
            ]
        ),
        max_size=12,
    ).map("".join),
    st.lists(st.integers(0, 120)),
)
def test_how_tool_calls_are_cut_makes_no_difference(text: str, cuts: list[int]) -> None:
    assert calls(text, cuts) == calls(text, [])


def test_the_arguments_of_a_call_come_while_they_are_written() -> None:
    parser = ToolCallParser()
    (first,) = parser.push('<tool_call>\n{"name": "w", "arguments": {"t')
    assert isinstance(first, ToolCallDelta)
    assert (first.index, first.name, first.arguments) == (0, "w", '{"t')
    assert first.id is not None and first.id.startswith("call_")
    assert parser.push('": 1') == [ToolCallDelta(0, '": 1')]
