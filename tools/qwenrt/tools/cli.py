"""The `qwenrt` command: finds the subcommand, and turns whatever ends it into an exit status and one line on stderr.

Exit status: 0 success, 1 a failure explained in one line, 2 bad usage, 130 Ctrl-C, 143 SIGTERM, 141 stdout was closed early.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, TextIO

import click

from qwenrt.plugins import QwenrtError, QwenrtWarning

from .errors import print_error, print_warning
from .signals import Stopped, catch_signals

COMMANDS = {
    "export": ("export", "Turn a checkpoint into an engine folder."),
    "build": ("build", "Build TensorRT plans for an engine folder."),
    "generate": ("generate", "Answer prompts with an engine."),
    "embed": ("embed", "Embed texts with an engine of an embedding model."),
    "chat": ("chat", "Talk with an engine or a server."),
    "serve": ("serve", "Serve an engine over HTTP, with OpenAI's API and a chat page at /."),
    "batch": ("batch", "Answer a file of requests in OpenAI's batch format."),
    "compare": ("compare.command", "Compare an engine with the model that it was made of."),
    "bench": ("bench.command", "Measure an engine's speed and memory, or a server's under load."),
    "simulate": ("simulate.command", "Predict latencies and throughput of one engine or many under a load."),
    "inspect": ("inspect", "Show what an engine folder or a checkpoint holds."),
    "make-checkpoint": ("make_checkpoint", "Write a random-weight Qwen3 checkpoint, for benchmarks and tests."),
}
"""Per command: the module of this package that has it as `command`, imported when it is used, and its summary."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f".{COMMANDS[cmd_name][0]}", __package__).command
        if not any(parameter.name == "debug" for parameter in command.params):
            command.params.append(_debug_option())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().obj = "debug"


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_set_debug,
        help="Show a failure's traceback.",
    )


@click.group(cls=_Commands, params=[_debug_option()], context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="qwenrt", message="%(prog)s %(version)s")
def group() -> None:
    """Turn a Qwen3 checkpoint into an engine and run it.

    \b
    Examples:
      qwenrt export ./Qwen3-0.6B engines/qwen3-0.6b
      qwenrt generate engines/qwen3-0.6b "Tell me a joke" --chat
      qwenrt chat engines/qwen3-0.6b
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status."""
    catch_signals()
    context: click.Context | None = None
    try:
        try:
            context = group.make_context("qwenrt", list(arguments))
            with warnings.catch_warnings(), context:
                _show_warnings()
                group.invoke(context)
        finally:
            if sys.stdout is not None:  # None where the caller closed it
                sys.stdout.flush()
        return 0
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except Stopped as stopped:
        print_error("interrupted" if stopped.interrupt else "terminated")
        return 128 + stopped.signum
    except BrokenPipeError:
        _discard_stdout()
        return 128 + signal.SIGPIPE
    except Exception as error:
        if context is not None and context.obj == "debug":
            traceback.print_exc()
        else:
            print_error(_explain(error))
        return 1


def main() -> NoReturn:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


def _show_warnings() -> None:
    """Our warnings as one line, others as Python shows them."""
    show = warnings.showwarning

    def show_ours(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, QwenrtWarning):
            print_warning(str(message))
        else:
            show(message, category, filename, lineno, file, line)

    warnings.simplefilter("always", QwenrtWarning)
    warnings.showwarning = show_ours


def _explain(error: Exception) -> str:
    if isinstance(error, QwenrtError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return "out of memory; lower --kv-memory or take a smaller model"
    return f"internal error, {type(error).__name__}: {error} (--debug shows where)"


def _discard_stdout() -> None:
    """Let the flush at exit succeed although nobody reads."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)


if __name__ == "__main__":
    main()
