"""`qwenrt serve`: an engine behind OpenAI's HTTP API."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from qwenrt.runtime import LoRARequest

from .extras import import_with_extra
from .loading import engine_arguments, load_llm
from .options import engine_options


@click.command()
@click.argument("engine")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--served-model-name", help="What requests call the model.  [default: the folder's name]")
@click.option(
    "--lora-modules",
    multiple=True,
    metavar="NAME=PATH",
    help="Serve the LoRA adapter in the folder PATH as the model NAME (of an engine exported with --max-lora-rank). Repeatable.",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="QWENRT_API_KEY",
    show_envvar=True,
    help="Serve only requests with this key. Repeatable; those with one key are one tenant, and tenants take turns.",
)
@click.option("--cors-origin", "cors_origins", multiple=True, help="Let web pages of this origin in. Repeatable.")
@click.option("--max-queue", type=click.IntRange(0), default=256, show_default=True, help="Requests that may wait.")
@click.option(
    "--request-timeout",
    type=click.FloatRange(0, min_open=True),
    help="Seconds that a request may take, waiting included; a request may ask for less by its field timeout.  [default: any]",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds for accepted requests to finish after SIGTERM or Ctrl-C.",
)
@engine_options
def command(
    engine: str,
    host: str,
    port: int,
    served_model_name: str | None,
    lora_modules: tuple[str, ...],
    api_keys: tuple[str, ...],
    **options: Any,
) -> None:
    """Serve an engine over HTTP, with OpenAI's API and a chat page at /.

    Chats, completions, tool calls, JSON by schema, streaming; /metrics for Prometheus, /health and /ready. SIGTERM or Ctrl-C
    ends it when the accepted requests are finished; a second one, at once.

    \b
    Examples:
      qwenrt serve engines/qwen3-0.6b
      qwenrt serve engines/adapters --lora-modules sql=./sql-adapter --lora-modules chat=./chat-adapter
      qwenrt serve engines/qwen3-0.6b --host 0.0.0.0 --port 80 --api-key "$KEY"
      curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """
    server = import_with_extra("qwenrt.runtime.server.run", "serve")
    if any(not key.strip() or not key.isascii() for key in api_keys):
        raise click.UsageError("--api-key must be ASCII and not empty")
    arguments = engine_arguments(options)
    name = served_model_name or Path(os.path.abspath(engine)).name
    adapters = _adapters(lora_modules, name)
    # The port is taken before the engine is loaded: that it is in use shows at once.
    with server.listen(host, port) as bound:
        llm = load_llm(engine, arguments)
        logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="qwenrt: %(levelname)s: %(message)s")
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{bound.getsockname()[1]}"
        server.serve(
            llm,
            bound,
            server.ServerOptions(model=name, adapters=adapters, api_keys=api_keys, **options),
            started=lambda: click.echo(f"serving {name} at {url}", err=True),
        )


def _adapters(modules: tuple[str, ...], model: str) -> list[LoRARequest]:
    """The adapters that --lora-modules names."""
    pairs = [module.partition("=") for module in modules]
    names = [name for name, _, _ in pairs]
    if not all(name and path for name, _, path in pairs) or len({*names, model}) <= len(names):
        raise click.UsageError(
            f"--lora-modules must be NAME=PATH, with names that differ from each other and from the model's, {model}"
        )
    return [LoRARequest(name, path) for name, _, path in pairs]
