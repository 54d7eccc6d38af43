"""SIGINT and SIGTERM as an exception, so that every `finally` runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def interrupt(self) -> bool:
        """Whether it was Ctrl-C."""
        return self.signum == signal.SIGINT


def catch_signals() -> None:
    """Make the next SIGINT and SIGTERM raise Stopped; one more of the same kind ends the process at once."""

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signum, signal.SIG_DFL)
        raise Stopped(signum)

    for signum in _SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, stop)


def run_async(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, where SIGINT and SIGTERM cancel `main`, and Stopped is raised once it has ended; one more ends the process.

    An exception in the midst of whatever the loop is doing would lose that, and who waits for it would wait forever.
    """
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    caught: list[int] = []

    async def cancelled_by_signals() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(signum: int) -> None:
            loop.remove_signal_handler(signum)
            signal.signal(signum, signal.SIG_DFL)
            caught.append(signum)
            task.cancel()

        for signum in _SIGNALS:
            if before[signum] != signal.SIG_IGN:
                loop.add_signal_handler(signum, stop, signum)
        return await main

    try:
        return asyncio.run(cancelled_by_signals())
    except BaseException:
        if caught:
            raise Stopped(caught[0]) from None
        raise
    finally:
        if not caught:
            for signum in _SIGNALS:
                signal.signal(signum, before[signum])
