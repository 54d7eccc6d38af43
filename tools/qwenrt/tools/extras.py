"""Modules that need the packages of an extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from qwenrt.plugins import ConfigError


def import_with_extra(module: str, extra: str) -> Any:
    """A module by its name, relative to this package or whole; raises ConfigError if the extra that it needs is missing."""
    try:
        return import_module(module, __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("qwenrt"):
            raise
        raise ConfigError(f"this needs {error.name}; install it with: pip install 'qwenrt[{extra}]'") from None
