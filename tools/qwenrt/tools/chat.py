"""`qwenrt chat`: a conversation, streamed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from qwenrt.runtime import LLM, RequestError, SamplingParams

from .errors import print_error
from .loading import check_text, engine_arguments, load_llm, sampling_params
from .options import engine_options, sampling_options
from .signals import Stopped, catch_signals

HELP = "/think and /no_think switch thinking, /reset forgets the conversation, /exit (or Ctrl-D) ends it"


@click.command()
@click.argument("engine")
@click.option("--system", help="The system message.")
@click.option("--thinking/--no-thinking", default=None, help="Let the model think first, or not.")
@sampling_options
@engine_options
def command(engine: str, system: str | None, thinking: bool | None, **options: Any) -> None:
    """Talk with an engine.

    A line is a message; the answer is streamed. /think and /no_think switch thinking, /reset forgets the conversation, /exit
    or Ctrl-D ends it. At a terminal, Ctrl-C stops the answer. Messages may also come through a pipe, one a line.

    \b
    Examples:
      qwenrt chat engines/qwen3-0.6b
      qwenrt chat engines/qwen3-0.6b --system "Answer in French." --temperature 0.7
      printf 'My name is Ada.\\nWhat is my name?\\n' | qwenrt chat engines/qwen3-0.6b --no-thinking
    """
    if system is not None:
        check_text(system, "--system")
    arguments = engine_arguments(options)
    params = sampling_params(options)
    chat = _Chat(load_llm(engine, arguments), system, thinking, params)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        click.echo(HELP, err=True)
    failed = False
    for line in _lines(interactive):
        if line.startswith("/") and chat.switch(line):
            continue
        if line == "/exit":
            break
        if not line:
            continue
        try:
            chat.say(line)
        except RequestError as error:
            failed = True
            print_error(f"{error}; /reset forgets the conversation")
        except Stopped as stopped:
            if not interactive or not stopped.interrupt:
                raise
            catch_signals()
    if failed and not interactive:
        raise RequestError("some messages were not answered")


def _lines(interactive: bool) -> Iterator[str]:
    if interactive:
        import readline  # noqa: F401  (gives input() its line editing)

        while True:
            try:
                yield input("> ").strip()
            except EOFError:
                click.echo()
                return
            except UnicodeDecodeError:
                print_error("the line is not valid UTF-8")
    for line in sys.stdin.buffer:
        try:
            yield line.decode().strip()
        except UnicodeDecodeError:
            raise RequestError("a line of stdin is not valid UTF-8") from None


class _Chat:
    """A conversation and what its next answer is made with."""

    def __init__(self, llm: LLM, system: str | None, thinking: bool | None, params: SamplingParams) -> None:
        self._llm = llm
        self._thinking = thinking
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    def switch(self, line: str) -> bool:
        """Obey a line if it is a command other than /exit."""
        match line:
            case "/think" | "/no_think":
                self._thinking = line == "/think"
            case "/reset":
                self._turns.clear()
            case "/help":
                click.echo(HELP, err=True)
            case _:
                return False
        return True

    def say(self, message: str) -> None:
        """Stream the answer to a message; both join the conversation unless the answer fails or is stopped."""
        turns = [*self._turns, {"role": "user", "content": message}]
        prompt = self._llm.render([*self._system, *turns], enable_thinking=self._thinking)
        engine = self._llm.engine
        engine.add_request("chat", prompt, self._params, add_special_tokens=False)
        text = ""
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    shown, text = len(text), output.outputs[0].text
                    click.echo(text[shown:], nl=False)
        finally:
            engine.abort("chat")
            click.echo()
        self._turns = [*turns, {"role": "assistant", "content": text}]
