"""`qwenrt generate`: prompts in, answers out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import click

from qwenrt.runtime import LLM, RequestError, RequestOutput, SamplingParams
from qwenrt.runtime.pooling import PoolingParams

from .errors import print_error
from .extras import import_with_extra
from .loading import abort_reason, check_text, engine_arguments, load_llm, sampling_params
from .options import engine_options, sampling_options
from .progress import Spinner, spinner


@dataclass(frozen=True)
class Failure:
    """Why one prompt got no answer."""

    message: str


@click.command()
@click.argument("engine")
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option("--prompts-file", type=click.File("rb"), help="Read prompts from a file, one a line; - is stdin.")
@click.option("--chat", is_flag=True, help="Put each prompt through the chat template, as a user's message.")
@click.option("--system", help="With --chat: the system message.")
@click.option("--thinking/--no-thinking", default=None, help="With --chat: let the model think first, or not.")
@click.option("-n", "n", type=int, default=1, show_default=True, help="Answers to each prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each prompt.")
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    help="Write every step's batch to a file, or a folder, in polygraphy's JSON, for qwenrt compare --inputs.",
)
@click.option("--logprobs", type=int, help="With --json: log-probabilities, and those of the k most likely tokens.")
@sampling_options
@engine_options
def command(
    engine: str,
    prompts: tuple[str, ...],
    prompts_file: Any,
    chat: bool,
    system: str | None,
    thinking: bool | None,
    as_json: bool,
    record: Path | None,
    **options: Any,
) -> None:
    """Answer prompts with an engine.

    One prompt's answer is streamed; several are answered together and printed in their order. A prompt that cannot be
    served is reported on stderr and the others go on; the exit status is then 1.

    \b
    Examples:
      qwenrt generate engines/qwen3-0.6b "The capital of France is" --max-tokens 8
      qwenrt generate engines/qwen3-0.6b "Tell me a joke" --chat --no-thinking --temperature 0.7 --seed 1
      qwenrt generate engines/qwen3-0.6b --prompts-file prompts.txt --json > answers.jsonl
    """
    if not chat and (system is not None or thinking is not None):
        raise click.UsageError("--system and --thinking need --chat")
    if options["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json")
    texts = given_texts("PROMPT", prompts, "--prompts-file", prompts_file)
    if system is not None:
        check_text(system, "--system")
    arguments = engine_arguments(options)
    params = sampling_params(options)
    if not texts:
        return
    llm = load_llm(engine, arguments)
    template = _Template(llm, system, thinking) if chat else None
    recording = import_with_extra(".compare.recording", "compare") if record else None
    with recording.recorded(llm, record) if recording else nullcontext():
        if len(texts) == params.n == 1 and not as_json:
            _add(llm, "0", texts[0], template, params)
            _stream(llm)
            return
        style = _JsonLines(llm) if as_json else _Headed(len(texts))
        with spinner("answering") as line:
            failed = answer_all(llm, texts, template, params, style, line)
    if failed:
        raise RequestError(f"{failed} of {len(texts)} prompts failed")


def given_texts(name: str, arguments: tuple[str, ...], option: str, file: Any) -> list[str]:
    """The arguments called `name`, or the lines of the file that `option` names.

    A usage error if there are both or neither, or one is not UTF-8.
    """
    if bool(arguments) == (file is not None):
        raise click.UsageError(f"give {name}s or {option}, one of the two")
    if arguments:
        return [check_text(text, f"{name} {number}") for number, text in enumerate(arguments, 1)]
    try:
        text: str = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{option} {file.name} is not valid UTF-8 at byte {error.start}") from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


@dataclass(frozen=True)
class _Template:
    """How a prompt becomes a conversation."""

    llm: LLM
    system: str | None
    thinking: bool | None

    def render(self, prompt: str) -> str:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.llm.render([*messages, {"role": "user", "content": prompt}], enable_thinking=self.thinking)


def _add(
    llm: LLM, request_id: str, prompt: str, template: _Template | None, params: SamplingParams | PoolingParams
) -> None:
    text = template.render(prompt) if template else prompt
    llm.engine.add_request(request_id, text, params, add_special_tokens=template is None)


def _stream(llm: LLM) -> None:
    shown = 0
    try:
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                text = output.outputs[0].text
                click.echo(text[shown:], nl=False)
                shown = len(text)
    finally:
        click.echo()
    if (reason := abort_reason(output)) is not None:
        raise RequestError(reason)


class _Style(Protocol):
    """How results are printed."""

    def format(self, index: int, prompt: str, result: RequestOutput | Failure) -> str: ...


class _Headed:
    """Answers as text, each under its prompt."""

    def __init__(self, count: int) -> None:
        self._count = count

    def format(self, index: int, prompt: str, result: RequestOutput | Failure) -> str:
        lines = []
        if self._count > 1:
            first = prompt.strip().split("\n")[0]
            lines.append(f"=== {index + 1}/{self._count}: {first[:79]}{'…' if first[79:] else ''}")
        if isinstance(result, Failure):
            return "\n".join([*lines, "(failed)"])
        for answer in result.outputs:
            if len(result.outputs) > 1:
                lines.append(f"--- answer {answer.index + 1}/{len(result.outputs)}")
            lines.append(answer.text)
        return "\n".join(lines)


class _JsonLines:
    """Answers as one JSON object a line."""

    def __init__(self, llm: LLM) -> None:
        self._tokenizer = llm.engine.tokenizer

    def format(self, index: int, prompt: str, result: RequestOutput | Failure) -> str:
        line: dict[str, Any] = {"index": index, "prompt": prompt}
        if isinstance(result, Failure):
            line["error"] = result.message
        else:
            line["prompt_tokens"] = len(result.prompt_token_ids)
            line["cached_tokens"] = result.num_cached_tokens
            line["outputs"] = [self._answer(answer) for answer in result.outputs]
        return json.dumps(line, ensure_ascii=False, allow_nan=False)

    def _answer(self, answer: Any) -> dict[str, Any]:
        out = {
            "index": answer.index,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if answer.logprobs is not None:
            out["cumulative_logprob"] = _finite(answer.cumulative_logprob)
            out["logprobs"] = [
                self._token(token.token_id, token.logprob)
                | {"top": [self._token(top, logprob) for top, logprob in token.top.items()]}
                for token in answer.logprobs
            ]
        return out

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return {"token_id": token_id, "token": text, "logprob": _finite(logprob)}


def _finite(value: float) -> float | None:
    """JSON has no infinity: a token that was ruled out has no log-probability."""
    return value if math.isfinite(value) else None


def answer_all(
    llm: LLM,
    prompts: Sequence[Any],
    template: _Template | None,
    params: SamplingParams | PoolingParams,
    style: _Style,
    line: Spinner,
) -> int:
    """Answer all prompts together and print each answer once those before it are printed; returns how many failed."""
    results: dict[int, RequestOutput | Failure] = {}
    failed = 0

    def report(index: int, reason: str) -> None:
        nonlocal failed
        failed += 1
        with line.hidden():
            print_error(f"prompt {index + 1}: {reason}")

    for index, prompt in enumerate(prompts):
        try:
            _add(llm, str(index), prompt, template, params)
        except RequestError as error:
            report(index, str(error))
            results[index] = Failure(str(error))
    printed = finished_tokens = 0
    start = perf_counter()
    while printed < len(prompts):
        while printed in results:
            with line.hidden():
                click.echo(style.format(printed, prompts[printed], results.pop(printed)))
            printed += 1
        running = 0
        for output in llm.engine.step():
            tokens = sum(len(answer.token_ids) for answer in output.outputs)
            if not output.finished:
                running += tokens
                continue
            finished_tokens += tokens
            results[int(output.request_id)] = output
            if (reason := abort_reason(output)) is not None:
                report(int(output.request_id), reason)
        rate = (finished_tokens + running) / (perf_counter() - start)
        done = f"{printed + len(results)} of {len(prompts)} prompts"
        line.update(f"{done}, {rate:.0f} tokens a second" if rate else done)
    return failed
