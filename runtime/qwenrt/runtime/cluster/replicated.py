"""`qwenrt serve --ray`: the life of a server whose engines are replicas on Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

from qwenrt.plugins import QwenrtError

from ..engine_dir import EngineDir
from ..server.run import ServerOptions, serve_until_told
from .fleet import Fleet, FleetSize
from .front import Front
from .prompt_keys import PromptKeys
from .session import LOCAL, cluster_cpus, cluster_gpus, gpus_for, threads_for

logger = logging.getLogger(__name__)


async def serve_replicas(
    address: str,
    engine: str,
    arguments: Mapping[str, Any],
    bound: socket.socket,
    options: ServerOptions,
    replicas: int | None,
    max_replicas: int | None,
    started: Callable[[], None],
) -> None:
    """Serve until SIGTERM or SIGINT, as `serve_until_told` does; `started` is called when requests are taken.

    SIGHUP reads the engine folder again, or the one that a link of this name now leads to, and has new replicas follow the old
    ones. To be run inside the `ray_session` of `address`. engine, arguments: of LLM; a path that all nodes have. replicas: by
    default one a node. max_replicas: how many there may be when requests wait.
    """
    folder = EngineDir.open(os.path.realpath(engine))
    cpus = cluster_cpus()
    least = replicas or len(cpus)
    most = max(least, max_replicas or 0)
    threads = arguments["threads"] or threads_for(most, cpus)
    gpus = gpus_for(folder.manifest, arguments)
    size = FleetSize(
        replicas=least,
        max_replicas=most,
        target_requests=arguments["max_num_seqs"] or folder.manifest.limits.max_num_seqs,
        # Half of what each uses, so that one that follows another finds room beside it.
        cpus=threads / 2,
        gpus=gpus,
        surge=not gpus or cluster_gpus() >= gpus * (most + 1),
    )
    name = f"qwenrt-{socket.gethostname()}-{bound.getsockname()[1]}"
    fleet = Fleet(name, {**arguments, "threads": threads}, options, size)
    front = Front(fleet, PromptKeys(folder))
    try:
        await fleet.deploy(str(folder.path))
        updates = _Updates(engine, fleet, front)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, updates.ask)
        app = front.guarded(api_keys=options.api_keys, cors_origins=options.cors_origins)
        await serve_until_told(app, bound, started, lambda: front.drain(options.drain_timeout))
    finally:
        if address != LOCAL:  # which ends with all that is on it
            await fleet.close()
        front.keys.close()


class _Updates:
    """Makes the replicas follow the engine folder when it is asked to; once more if it is asked meanwhile."""

    def __init__(self, engine: str, fleet: Fleet, front: Front) -> None:
        self._engine = engine
        self._fleet = fleet
        self._front = front
        self._task: asyncio.Task[None] | None = None
        self._asked = False

    def ask(self) -> None:
        """Update the replicas soon."""
        self._asked = True
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._asked:
            self._asked = False
            try:
                folder = EngineDir.open(os.path.realpath(self._engine))
                keys = PromptKeys(folder)
                await self._fleet.deploy(str(folder.path))
            except QwenrtError as error:
                logger.error("the engine was not updated: %s", error)
                continue
            self._front.keys, old = keys, self._front.keys
            old.close()
            logger.warning("all replicas have the engine of %s", folder.path)
