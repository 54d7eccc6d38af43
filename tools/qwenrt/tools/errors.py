"""How the commands tell of a failure."""

from __future__ import annotations

import sys


def print_error(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    line = printable(" ".join(message.split()))
    print(f"qwenrt: error: {line}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """The text with control characters escaped, so that a file's contents cannot drive the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
