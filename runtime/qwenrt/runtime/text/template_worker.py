"""Renders chat templates in a process of its own, so that a hostile one can take no more than bounded time and memory.

Run as a script by `chat_template`, which sends JSON lines: first all templates by name, then one request after the other. Each
request gets one line back, `{"text": ...}` or `{"error": ...}`. A request that takes too long ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils


class _GenerationTag(jinja2.ext.Extension):  # type: ignore[misc]
    """`{% generation %}` marks what an assistant wrote, for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without names that Python gives a meaning."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"namespace attributes may not start with an underscore, as {name[:40]!r} does"
        )


def environment() -> jinja2.Environment:
    """The sandbox that transformers renders chat templates in."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    made.globals["namespace"] = _Namespace
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a model must not see."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    pieces = []
    room = max_chars
    for piece in template.generate(variables):
        room -= len(piece)
        if room < 0:
            raise jinja2.TemplateError(f"the rendered text has more than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def _answer(
    sources: dict[str, str], compiled: dict[str, jinja2.Template], request: dict[str, Any], max_chars: int
) -> dict[str, str]:
    name = request["template"]
    try:
        if name not in compiled:
            compiled[name] = environment().from_string(sources[name])
        return {"text": _render(compiled[name], request["variables"], max_chars)}
    except MemoryError:
        return {"error": "it needs more memory than it may have"}
    except jinja2.TemplateError as error:
        return {"error": str(error)[:500]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    """Serve requests until the input ends."""
    max_bytes, max_chars, max_seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sources = json.loads(sys.stdin.buffer.readline())
    compiled: dict[str, jinja2.Template] = {}
    for line in sys.stdin.buffer:
        # The signal's default action ends the process, even inside one long call of the C library.
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        reply = json.dumps(_answer(sources, compiled, json.loads(line), max_chars)).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
