"""`qwenrt chat`: a conversation, streamed."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, Protocol

import click

from qwenrt.runtime import LLM, QwenrtError, RequestError, SamplingParams

from .errors import print_error
from .loading import abort_reason, check_text, engine_arguments, load_llm, sampling_params
from .options import engine_options, sampling_options
from .signals import Stopped, catch_signals

HELP = "/think and /no_think switch thinking, /reset forgets the conversation, /exit (or Ctrl-D) ends it"


@click.command()
@click.argument("engine", required=False)
@click.option("--url", help="Talk with the OpenAI-compatible server here, such as http://127.0.0.1:8000/v1.")
@click.option("--model", help="The server's model.  [default: the first that it names]")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="The server's key.  [env: OPENAI_API_KEY]")
@click.option("--system", help="The system message.")
@click.option("--thinking/--no-thinking", default=None, help="Let the model think first, or not.")
@sampling_options
@engine_options
def command(
    engine: str | None,
    url: str | None,
    model: str | None,
    api_key: str | None,
    system: str | None,
    thinking: bool | None,
    **options: Any,
) -> None:
    """Talk with an engine or a server.

    A line is a message; the answer is streamed. /think and /no_think switch thinking, /reset forgets the conversation, /exit
    or Ctrl-D ends it. At a terminal, Ctrl-C stops the answer. Messages may also come through a pipe, one a line.

    \b
    Examples:
      qwenrt chat engines/qwen3-0.6b
      qwenrt chat engines/qwen3-0.6b --system "Answer in French." --temperature 0.7
      printf 'My name is Ada.\\nWhat is my name?\\n' | qwenrt chat engines/qwen3-0.6b --no-thinking
      qwenrt chat --url http://127.0.0.1:8000/v1
    """
    if (engine is None) == (url is None):
        raise click.UsageError("give an ENGINE folder, or --url with a server's address")
    if system is not None:
        check_text(system, "--system")
    arguments = engine_arguments(options)
    params = sampling_params(options)
    chat = _Chat(_partner(engine, url, model, api_key, arguments, params), system, thinking)
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


class Partner(Protocol):
    """Who answers."""

    def answer(self, messages: list[dict[str, str]], thinking: bool | None) -> Generator[str, None, None]:
        """The answer to a conversation, piece by piece; closing the iterator stops it. Raises RequestError if it fails."""


def _partner(
    engine: str | None,
    url: str | None,
    model: str | None,
    api_key: str | None,
    arguments: dict[str, Any],
    params: SamplingParams,
) -> Partner:
    if url is None:
        assert engine is not None
        return _LocalPartner(load_llm(engine, arguments), params)
    try:
        from .remote_chat import RemotePartner
    except ImportError as error:
        raise QwenrtError(f"chat --url needs httpx ({error}); install it with: pip install 'qwenrt[serve]'") from None
    return RemotePartner(url, model=model, api_key=api_key, params=params)


class _LocalPartner:
    """An engine in this process."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params

    def answer(self, messages: list[dict[str, str]], thinking: bool | None) -> Generator[str, None, None]:
        prompt = self._llm.render(messages, enable_thinking=thinking)
        engine = self._llm.engine
        engine.add_request("chat", prompt, self._params, add_special_tokens=False)
        shown = 0
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    text = output.outputs[0].text
                    yield text[shown:]
                    shown = len(text)
                    if (reason := abort_reason(output)) is not None:
                        raise RequestError(reason)
        finally:
            engine.abort("chat")


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
    """A conversation and who answers."""

    def __init__(self, partner: Partner, system: str | None, thinking: bool | None) -> None:
        self._partner = partner
        self._thinking = thinking
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
        pieces: list[str] = []
        try:
            with closing(self._partner.answer([*self._system, *turns], self._thinking)) as answer:
                for piece in answer:
                    pieces.append(piece)
                    click.echo(piece, nl=False)
        finally:
            click.echo()
        self._turns = [*turns, {"role": "assistant", "content": "".join(pieces)}]
