"""`qwenrt serve`: an engine behind OpenAI's HTTP API."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from qwenrt.runtime import LoRARequest
from qwenrt.runtime.cluster.session import ray_session
from qwenrt.runtime.engine_dir import EngineDir

from .extras import import_with_extra
from .loading import engine_arguments, load_llm
from .options import COUNT, engine_options, ray_option
from .progress import spinner
from .signals import run_async


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
@ray_option
@click.option("--replicas", type=COUNT, help="With --ray: engines that share the requests.  [default: one a node]")
@click.option("--max-replicas", type=COUNT, help="With --ray: start more of them, up to so many, while requests wait.")
@engine_options
def command(
    engine: str,
    host: str,
    port: int,
    served_model_name: str | None,
    lora_modules: tuple[str, ...],
    api_keys: tuple[str, ...],
    ray_address: str | None,
    replicas: int | None,
    max_replicas: int | None,
    **options: Any,
) -> None:
    """Serve an engine over HTTP, with OpenAI's API and a chat page at /.

    Chats, completions, tool calls, JSON by schema, streaming; /metrics for Prometheus, /health and /ready. SIGTERM or Ctrl-C
    ends it when the accepted requests are finished; a second one, at once.

    With --ray, each replica is a process with an engine of its own, and ENGINE a path that all nodes have. Requests whose prompts
    begin alike go to one replica, which has computed that beginning. A lost replica fails the requests that it had and is
    replaced. SIGHUP reads ENGINE again, or where that link now leads, and replaces the replicas one by one; no request fails.

    \b
    Examples:
      qwenrt serve engines/qwen3-0.6b
      qwenrt serve engines/adapters --lora-modules sql=./sql-adapter --lora-modules chat=./chat-adapter
      qwenrt serve engines/qwen3-0.6b --host 0.0.0.0 --port 80 --api-key "$KEY"
      curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'
      qwenrt serve /shared/qwen3-0.6b --ray 10.0.0.1:6379 --replicas 8
    """
    if ray_address is None and (replicas is not None or max_replicas is not None):
        raise click.UsageError("--replicas and --max-replicas need --ray")
    if max_replicas is not None and max_replicas < (replicas or 1):
        raise click.UsageError("--max-replicas is less than --replicas")
    server = import_with_extra("qwenrt.runtime.server.run", "serve")
    if any(not key.strip() or not key.isascii() for key in api_keys):
        raise click.UsageError("--api-key must be ASCII and not empty")
    arguments = engine_arguments(options)
    name = served_model_name or Path(os.path.abspath(engine)).name
    adapters = _adapters(lora_modules, name)
    server_options = server.ServerOptions(model=name, adapters=adapters, api_keys=api_keys, **options)
    # The port is taken before the engine is loaded: that it is in use shows at once.
    with server.listen(host, port) as bound:
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{bound.getsockname()[1]}"

        def started() -> None:
            click.echo(f"serving {name} at {url}", err=True)

        if ray_address is None:
            llm = load_llm(engine, arguments)
            _log_warnings()
            server.serve(llm, bound, server_options, started)
            return
        EngineDir.open(engine)
        with ExitStack() as waiting:
            waiting.enter_context(spinner(f"starting replicas of {engine}"))
            with ray_session(ray_address):
                from qwenrt.runtime.cluster.replicated import serve_replicas

                _log_warnings()

                def all_started() -> None:
                    waiting.close()
                    started()

                run_async(
                    serve_replicas(
                        ray_address, engine, arguments, bound, server_options, replicas, max_replicas, all_started
                    )
                )


def _log_warnings() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="qwenrt: %(levelname)s: %(message)s")


def _adapters(modules: tuple[str, ...], model: str) -> list[LoRARequest]:
    """The adapters that --lora-modules names."""
    pairs = [module.partition("=") for module in modules]
    names = [name for name, _, _ in pairs]
    if not all(name and path for name, _, path in pairs) or len({*names, model}) <= len(names):
        raise click.UsageError(
            f"--lora-modules must be NAME=PATH, with names that differ from each other and from the model's, {model}"
        )
    return [LoRARequest(name, os.path.abspath(path)) for name, _, path in pairs]
