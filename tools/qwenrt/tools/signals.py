"""SIGINT and SIGTERM as an exception, so that every `finally` runs."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn


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

    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, stop)
