"""Requests that generate nothing: embeddings, classes and scores, from what the engine gives for a prompt's last token.

What is asked is a `PoolingWork`: prompts, and what is made of their rows. `LLM` and the server run it, each in its own way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import RequestError

from .engine_dir import EngineManifest
from .outputs import ClassificationOutput, EmbeddingOutput, RequestOutput, ScoreOutput
from .text.tokenizer import Tokenizer

Floats = npt.NDArray[np.float32]
Result = TypeVar("Result")

DEFAULT_RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QUERY = "Instruct: {instruction}\nQuery:{text}"
"""How Qwen3-Embedding was trained to be told what a query is for; documents stand alone."""
_PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""What Qwen3-Reranker was trained on."""
_REMEDIES = {
    "generate": "give an engine of a causal language model (--task generate)",
    "embed": "give an engine of an embedding model (--task embed)",
    "classify": "give an engine of a sequence classifier (--task classify)",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Asks for the row that an engine's graph gives for a prompt's last token, in place of tokens."""

    columns: tuple[int, ...] | None = None
    """Which of its numbers, by index; None for all."""


class PooledRow(NamedTuple):
    """What came of a prompt: the numbers that its params ask for, its tokens, and how many of them were cached."""

    values: Floats
    prompt_token_ids: list[int]
    num_cached_tokens: int

    @classmethod
    def of(cls, output: RequestOutput) -> PooledRow:
        """That of a finished request."""
        assert output.pooled is not None
        return cls(output.pooled, output.prompt_token_ids, output.num_cached_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class PoolingWork(Generic[Result]):
    """Prompts to be pooled with `params`, and what their rows, in the same order, are made into."""

    prompts: Sequence[str | Sequence[int]]
    params: PoolingParams
    add_special_tokens: bool
    """As in `Tokenizer.encode`."""
    results: Callable[[Sequence[PooledRow]], list[Result]]
    """Raises RequestError if a row is not finite."""


def check_task(manifest: EngineManifest, task: str, what: str) -> None:
    """Raise RequestError unless the engine is for `task`, which `what` needs."""
    if manifest.task != task:
        raise RequestError(f"this engine's task is {manifest.task}, it cannot {what}; {_REMEDIES[task]}")


def embedding_work(
    manifest: EngineManifest,
    inputs: Sequence[str | Sequence[int]],
    *,
    dimensions: int | None = None,
    normalize: bool = True,
    instruction: str | None = None,
) -> PoolingWork[EmbeddingOutput]:
    """Embeddings of texts or token ids, as `LLM.embed` has them; raises RequestError if they cannot be had."""
    check_task(manifest, "embed", "embed")
    hidden = manifest.model.hidden_size
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= hidden):
        raise RequestError(f"dimensions is {dimensions!r}; it must be an integer from 1 to {hidden}")
    params = PoolingParams(columns=None if dimensions is None else tuple(range(dimensions)))
    prompts = inputs if instruction is None else [_instructed(text, instruction) for text in inputs]

    def results(rows: Sequence[PooledRow]) -> list[EmbeddingOutput]:
        return [EmbeddingOutput(_unit(row.values) if normalize else _finite(row.values), *row[1:]) for row in rows]

    return PoolingWork(prompts, params, True, results)


def classification_work(
    manifest: EngineManifest, inputs: Sequence[str | Sequence[int]]
) -> PoolingWork[ClassificationOutput]:
    """Probabilities of the labels, as `LLM.classify` has them; raises RequestError if they cannot be had."""
    check_task(manifest, "classify", "classify")

    def results(rows: Sequence[PooledRow]) -> list[ClassificationOutput]:
        return [ClassificationOutput(_probabilities(row.values), *row[1:]) for row in rows]

    return PoolingWork(inputs, PoolingParams(), True, results)


def scoring_work(
    manifest: EngineManifest,
    tokenizer: Tokenizer,
    queries: Sequence[str],
    documents: Sequence[str],
    *,
    instruction: str | None = None,
) -> PoolingWork[ScoreOutput]:
    """Scores of pairs of texts, as `LLM.score` has them; raises RequestError if they cannot be had."""
    if len(queries) not in (1, len(documents)):
        raise RequestError(f"{len(queries)} queries for {len(documents)} documents; give one query, or one each")
    for text in (*queries, *documents):
        if not isinstance(text, str):
            raise RequestError(f"a query or document is a {type(text).__name__}; it must be text")
    if manifest.task == "embed":
        return _cosine_work(queries, documents, instruction)
    columns = None
    if manifest.task == "generate":
        columns = _answers(tokenizer)
    elif len(manifest.labels) != 1:
        raise RequestError(f"this engine has {len(manifest.labels)} labels; scores need a classifier of one label")
    instruction = DEFAULT_RERANK_INSTRUCTION if instruction is None else instruction
    prompts = [
        _PAIR.format(instruction=instruction, query=query, document=document)
        for query, document in zip(_spread(queries, len(documents)), documents, strict=True)
    ]

    def results(rows: Sequence[PooledRow]) -> list[ScoreOutput]:
        return [ScoreOutput(float(_probabilities(row.values)[0]), *row[1:]) for row in rows]

    return PoolingWork(prompts, PoolingParams(columns=columns), False, results)


def _cosine_work(queries: Sequence[str], documents: Sequence[str], instruction: str | None) -> PoolingWork[ScoreOutput]:
    prompts = queries if instruction is None else [_instructed(query, instruction) for query in queries]

    def results(rows: Sequence[PooledRow]) -> list[ScoreOutput]:
        pairs = zip(_spread(rows[: len(queries)], len(documents)), rows[len(queries) :], strict=True)
        return [
            ScoreOutput(
                float(_unit(query.values) @ _unit(document.values)),
                query.prompt_token_ids + document.prompt_token_ids,
                query.num_cached_tokens + document.num_cached_tokens,
            )
            for query, document in pairs
        ]

    return PoolingWork([*prompts, *documents], PoolingParams(), True, results)


def _spread(items: Sequence[Result], count: int) -> Sequence[Result]:
    """One item for each of `count`, if there is but one."""
    return items if len(items) == count else [items[0]] * count


def _instructed(text: str | Sequence[int], instruction: str) -> str:
    if not isinstance(text, str):
        raise RequestError("instruction is given and an input is token ids; give text, or leave instruction out")
    return _QUERY.format(instruction=instruction, text=text)


def _answers(tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens that a reranker answers with, yes first."""
    yes, no = tokenizer.token_id("yes"), tokenizer.token_id("no")
    if yes is None or no is None:
        raise RequestError("this engine's tokenizer has no tokens yes and no; scores need a reranker")
    return yes, no


def _finite(values: Floats) -> Floats:
    if not np.isfinite(values).all():
        raise RequestError("the model gave numbers that are not finite; use an engine with a wider dtype")
    return values


def _unit(values: Floats) -> Floats:
    """The vector at length 1."""
    wide = _finite(values).astype(np.float64)
    return (wide / max(float(np.linalg.norm(wide)), 1e-12)).astype(np.float32)


def _probabilities(logits: Floats) -> Floats:
    """Softmax of the logits; of a single one the logistic function, as it were beside a logit of 0."""
    wide = _finite(logits).astype(np.float64)
    beside = np.append(wide, 0.0) if len(wide) == 1 else wide
    weights = np.exp(beside - beside.max())
    probabilities: Floats = (weights / weights.sum())[: len(wide)].astype(np.float32)
    return probabilities
