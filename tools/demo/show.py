"""Answers held-out prompts of every task with an engine of the demo checkpoint and checks the answers to the letter."""

from __future__ import annotations

import argparse

from demo.tasks import TASKS, Example, held_out
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qwenrt.runtime import LLM, SamplingParams

SEED = 7
LINES = 6
"""Lines of a prompt or an answer that are shown."""
REQUIRED = 0.9
"""Fewer right answers than this mean that something is broken."""


def shown(text: str) -> str:
    """The text with its middle left out if it has many lines."""
    lines = text.split("\n")
    if len(lines) > LINES:
        lines = [*lines[: LINES // 2], f"… {len(lines) - LINES} more lines …", *lines[-(LINES // 2) :]]
    return "\n".join(lines)


def main() -> None:
    """Command line: print a table of prompts and answers; exit status 1 if too many are wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", help="folder that qwenrt export made of tools/demo/checkpoint")
    parser.add_argument("--count", type=int, default=2, help="prompts of each task")
    arguments = parser.parse_args()
    examples: list[Example] = [example for task in TASKS for example in held_out(task, arguments.count, SEED)]
    llm = LLM(arguments.engine)
    prompts = [
        llm.render(example.messages, tools=example.tools, enable_thinking=example.enable_thinking)
        for example in examples
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=256))
    table = Table("task", "question", "answer", "right", show_lines=True)
    right = 0
    for example, output in zip(examples, outputs, strict=True):
        answer = output.outputs[0].text
        right += answer == example.answer
        mark = "yes" if answer == example.answer else f"no, it is {example.answer}"
        cells = example.task, shown(example.messages[-1]["content"]), shown(answer), mark
        table.add_row(*map(Text, cells))
    console = Console()
    console.print(table)
    console.print(f"{right} of {len(examples)} answers are right to the letter.")
    if right < REQUIRED * len(examples):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
