"""How the commands tell of a failure, and of what may become one."""

from __future__ import annotations

import sys


def print_error(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    _print("error", message)


def print_warning(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    _print("warning", message)


def _print(kind: str, message: str) -> None:
    line = printable(" ".join(message.split()))
    print(f"qwenrt: {kind}: {line}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """The text with control characters escaped, so that a file's contents cannot drive the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
