"""`qwenrt embed`: texts in, embeddings out."""

from __future__ import annotations

import json
from typing import Any

import click

from qwenrt.runtime import RequestError, RequestOutput
from qwenrt.runtime.outputs import EmbeddingOutput
from qwenrt.runtime.pooling import PooledRow, PoolingWork, embedding_work

from .generate import Failure, answer_all, given_texts
from .loading import check_text, engine_arguments, load_llm
from .options import COUNT, engine_options
from .progress import spinner


@click.command()
@click.argument("engine")
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("--texts-file", type=click.File("rb"), help="Read texts from a file, one a line; - is stdin.")
@click.option("--dimensions", type=COUNT, help="Keep only so many numbers, the first (of a model trained for that).")
@click.option("--normalize/--no-normalize", default=True, help="Scale embeddings to length 1, or not.")
@click.option("--instruction", help="What the texts are queries for; documents get none.")
@engine_options
def command(
    engine: str,
    texts: tuple[str, ...],
    texts_file: Any,
    dimensions: int | None,
    normalize: bool,
    instruction: str | None,
    **options: Any,
) -> None:
    """Embed texts with an engine of an embedding model.

    Prints one JSON object a line for each text, in their order. A text that cannot be embedded is reported on stderr and the
    others go on; the exit status is then 1.

    \b
    Examples:
      qwenrt embed engines/qwen3-embedding "Paris is the capital of France."
      qwenrt embed engines/qwen3-embedding --texts-file passages.txt --dimensions 256 > passages.jsonl
      qwenrt embed engines/qwen3-embedding "capital of France" --instruction "Find passages that answer the question"
    """
    given = given_texts("TEXT", texts, "--texts-file", texts_file)
    if instruction is not None:
        check_text(instruction, "--instruction")
    arguments = engine_arguments(options)
    if not given:
        return
    llm = load_llm(engine, arguments)
    manifest = llm.engine.manifest
    work = embedding_work(manifest, given, dimensions=dimensions, normalize=normalize, instruction=instruction)
    with spinner("embedding") as line:
        failed = answer_all(llm, work.prompts, None, work.params, _JsonLines(work, given), line)
    if failed:
        raise RequestError(f"{failed} of {len(given)} texts failed")


class _JsonLines:
    """Embeddings as one JSON object a line."""

    def __init__(self, work: PoolingWork[EmbeddingOutput], texts: list[str]) -> None:
        self._work = work
        self._texts = texts

    def format(self, index: int, prompt: str, result: RequestOutput | Failure) -> str:
        line: dict[str, Any] = {"index": index, "text": self._texts[index]}
        if isinstance(result, Failure):
            line["error"] = result.message
        else:
            [output] = self._work.results([PooledRow.of(result)])
            line["prompt_tokens"] = len(output.prompt_token_ids)
            line["cached_tokens"] = output.num_cached_tokens
            line["embedding"] = output.embedding.tolist()
        return json.dumps(line, ensure_ascii=False, allow_nan=False)
