"""Batch files of requests that the demo engine answers exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo.tasks import Example, held_out


def examples(count: int) -> list[Example]:
    """Distinct examples of several tasks."""
    tasks = ("copy", "reverse", "add", "lookup")
    return [example for task in tasks for example in held_out(task, -(-count // len(tasks)), 5)][:count]


def chat_row(custom_id: str, example: Example, **body: Any) -> dict[str, Any]:
    """A greedy request as a line of a batch file."""
    chat = {
        "messages": example.messages,
        "chat_template_kwargs": {"enable_thinking": example.enable_thinking},
        "temperature": 0,
        "max_tokens": 60,
    }
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": chat | body}


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write a line for each row; text and bytes as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_answers(path: Path) -> list[dict[str, Any]]:
    """All lines of an output."""
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def contents(path: Path) -> dict[str, str]:
    """What was answered to each custom_id, each of which has one answer."""
    answers = read_answers(path)
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in answers}
    assert len(texts) == len(answers)
    return texts
