"""JSON files from strangers: read with a bound, each field checked for type and range."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qwenrt.plugins import ConfigError

MAX_BYTES = 32 << 20
"""Largest text that is parsed: an index of a quarter of a million tensors. As Python objects it takes up to 26 times as much."""
_MAX_CONFIG_BYTES = 1 << 20


def read_config(path: Path) -> Fields:
    """The fields of a configuration file, which is at most 1 MiB long."""
    return Fields(read_json_object(path, max_bytes=_MAX_CONFIG_BYTES), str(path))


def read_json_object(path: Path, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a JSON file; raises ConfigError if it cannot be read, is too large, no JSON, or no object."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ConfigError(f"{path} has {size} bytes, at most {max_bytes} are read; download the checkpoint again")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; download the checkpoint again") from None
    return parse_json_object(data, str(path))


def parse_json_object(data: bytes, source: str) -> dict[str, Any]:
    """The object in UTF-8 JSON text; `source` names it in errors. A key that an object has twice is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ConfigError(f"{source} has the key {shown(twice)} twice; remove one")
        return result

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply; download the checkpoint again") from None
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON ({error}); download the checkpoint again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source} must hold a JSON object, not {shown(value)}; download the checkpoint again")
    return value


def shown(value: object) -> str:
    """A value as an error message quotes it: JSON, one line, at most 60 characters."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """Typed reads from one JSON object. An absent field takes `default`; without one it is an error, and so is null."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def wrong(self, name: str, allowed: str) -> ConfigError:
        """The error for a field whose value is not allowed."""
        found = f"is {shown(self.values[name])}" if name in self.values else "is missing"
        return ConfigError(f"{self.source}: {name} {found}, must be {allowed}")

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1) -> int:
        """An integer in [low, high]; true and 1.0 are none."""
        value: Any = self.values.get(name, default) if default is not None else self.values.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None, *, low: float, high: float) -> float:
        """A finite number in [low, high]."""
        value: Any = self.values.get(name, default) if default is not None else self.values.get(name)
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """true or false; null is `default`."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """One of some strings; null is `default`."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(name, " or ".join(json.dumps(choice) for choice in choices))
        return value

    def object(self, name: str) -> Fields | None:
        """A nested object that is not empty, or None where it is absent, null or empty."""
        value = self.values.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object or null")
        return Fields(value, f"{self.source}: {name}")
