"""Turns training examples into batches of tokens with the loss on the answers alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from demo.tasks import (
    MAX_LOOKUP_LINES,
    Example,
    train_example,
    train_lookups,
    train_tool_calls,
)
from demo.tokenizer import END_OF_TURN
from torch import Tensor
from transformers import PreTrainedTokenizerFast

TOOL_CHOICE = "tool_choice"
"""A stream for training alone: rows of calls that choose between the same two tools."""

QUESTIONS_PER_LIST = 16
CALLS_PER_PAIR = 8
POOL_EXAMPLES = 400
POOL_LISTS = 24
POOL_PAIRS = 48
# Padding to a multiple keeps the number of distinct shapes, and so the allocator's churn, small.
LENGTH_MULTIPLE = 8


@dataclass(frozen=True)
class Row:
    """Token ids of one sequence; `is_answer[i]` marks ids the model has to produce."""

    ids: list[int]
    is_answer: list[bool]


@dataclass(frozen=True)
class Batch:
    """`ids` [rows, length] padded on the right; `is_answer` [rows, length] marks the targets."""

    ids: Tensor
    is_answer: Tensor


def render_prompt(tokenizer: PreTrainedTokenizerFast, example: Example) -> str:
    """The example's messages through the chat template, up to where the answer starts."""
    return str(
        tokenizer.apply_chat_template(
            example.messages,
            tools=example.tools,
            add_generation_prompt=True,
            enable_thinking=example.enable_thinking,
            tokenize=False,
        )
    )


def encode_turns(tokenizer: PreTrainedTokenizerFast, turns: Sequence[Example]) -> Row:
    """One sequence of prompts and answers, in which later prompts may refer to earlier ones."""
    ids: list[int] = []
    is_answer: list[bool] = []
    for index, turn in enumerate(turns):
        prompt = ("\n" if index else "") + render_prompt(tokenizer, turn)
        for text, wanted in ((prompt, False), (turn.answer + END_OF_TURN, True)):
            piece = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
            ids += piece
            is_answer += [wanted] * len(piece)
    return Row(ids, is_answer)


def collate(rows: Sequence[Row], padding_id: int) -> Batch:
    """Pad the rows on the right; causal attention then needs no mask."""
    longest = max(len(row.ids) for row in rows)
    length = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    ids = torch.full((len(rows), length), padding_id)
    is_answer = torch.zeros((len(rows), length), dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        is_answer[index, : len(row.ids)] = torch.tensor(row.is_answer)
    return Batch(ids, is_answer)


class BatchStream:
    """Endless batches of one task, of about `tokens` tokens each and rows of similar length.

    `size` in (0, 1] scales the lengths of the examples drawn from now on.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, task: str, tokens: int, seed: int) -> None:
        self.size = 1.0
        self._tokenizer = tokenizer
        self._task = task
        self._tokens = tokens
        self._rng = random.Random(f"train/{task}/{seed}")

    def __iter__(self) -> Iterator[Batch]:
        while True:
            rows = sorted(self._pool(), key=lambda row: len(row.ids))
            batches = list(self._cut(rows))
            self._rng.shuffle(batches)
            for batch in batches:
                yield collate(batch, self._tokenizer.pad_token_id)

    def _pool(self) -> list[Row]:
        if self._task == "lookup":
            return [encode_turns(self._tokenizer, self._lookups()) for _ in range(POOL_LISTS)]
        if self._task == TOOL_CHOICE:
            return [
                encode_turns(self._tokenizer, train_tool_calls(self._rng, CALLS_PER_PAIR)) for _ in range(POOL_PAIRS)
            ]
        return [
            encode_turns(self._tokenizer, [train_example(self._task, self._rng, self.size)])
            for _ in range(POOL_EXAMPLES)
        ]

    def _lookups(self) -> list[Example]:
        longest = max(3, round(MAX_LOOKUP_LINES * self.size))
        return train_lookups(self._rng, self._rng.randint(2, longest), QUESTIONS_PER_LIST)

    def _cut(self, rows: list[Row]) -> Iterator[list[Row]]:
        """Cut rows sorted by length into batches whose padded size is at most `tokens`."""
        batch: list[Row] = []
        for row in rows:
            if batch and (len(batch) + 1) * len(row.ids) > self._tokens:
                yield batch
                batch = []
            batch.append(row)
        yield batch
