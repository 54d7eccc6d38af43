"""The server's life: listen, load, serve, and on SIGTERM or SIGINT finish what was accepted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from qwenrt.plugins import ConfigError

from ..adapters import LoRARequest
from ..async_llm import AsyncLLM
from ..llm import LLM
from .app import create_app
from .generation import Service
from .sampling import recommended_sampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a model is served."""

    model: str
    """The name that requests give it."""
    adapters: Sequence[LoRARequest] = ()
    """LoRA adapters, which requests name in its place."""
    api_keys: Sequence[str] = ()
    """Without one, everybody is served."""
    cors_origins: Sequence[str] = ()
    """Web pages of these origins may use the server."""
    max_queue: int = 256
    """Requests that may wait."""
    request_timeout: float | None = None
    """Seconds that a request may take."""
    drain_timeout: float = 30.0
    """Seconds that accepted requests get to finish when the server is told to stop."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen yet; port 0 takes a free one. Raises ConfigError if that cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from None
    return bound


def serve(llm: LLM, bound: socket.socket, options: ServerOptions, started: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; `started` is called when requests are taken.

    Raises RequestError, before that, for an adapter that is wrong.
    """
    for adapter in options.adapters:
        llm.engine.adapters.get(adapter)

    async def live() -> None:
        async_llm = AsyncLLM(llm, max_queue=options.max_queue, request_timeout=options.request_timeout)
        service = Service(async_llm, options.model, recommended_sampling(llm.path), options.adapters)
        app = create_app(service, api_keys=options.api_keys, cors_origins=options.cors_origins)
        await serve_until_told(app, bound, started, lambda: async_llm.drain(options.drain_timeout))
        await async_llm.close()

    asyncio.run(live())


async def serve_until_told(
    app: ASGIApp, bound: socket.socket, started: Callable[[], None], drain: Callable[[], Coroutine[None, None, None]]
) -> None:
    """Serve an application until SIGTERM or SIGINT; `started` is called when requests are taken.

    The first signal calls `drain`, which ends the taking of requests and finishes those accepted, or fails them when its time is
    over. Connections are still accepted meanwhile: a refusal in words is better than a closed port. A second signal ends at once.
    """
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=10
    )
    server = _Server(config, started)
    draining: list[asyncio.Task[None]] = []

    async def finish() -> None:
        await drain()
        server.should_exit = True

    def stop() -> None:
        if draining:
            server.should_exit = server.force_exit = True
        else:
            draining.append(asyncio.ensure_future(finish()))

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop)
    await server.serve([bound])


class _Server(uvicorn.Server):
    """Leaves the signals to us, and tells when it has started."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell()
