"""Messages to a prompt, by the checkpoint's own chat template."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qwenrt.plugins import ConfigError, RequestError

from .messages import check_messages, check_tools
from .tokenizer import MAX_TEXT_CHARS, read_config, read_text, special_tokens

MAX_TEMPLATE_BYTES = 256 << 10
MAX_REQUEST_BYTES = 16 << 20
"""Messages, tools and arguments of one rendering together, as JSON."""
MAX_MEMORY_BYTES = 512 << 20
"""Address space of the process that renders."""
MAX_SECONDS = 2.0
"""Processor time of one rendering."""
_WAIT_FACTOR = 10
"""The clock may run this much longer than the processor before a rendering is given up (a busy machine)."""


class ChatTemplate:
    """A checkpoint's chat template, rendered as transformers does. Safe to use from several threads.

    A template is untrusted code: it runs in Jinja's sandbox, in a process that is started at the first `render` and may use
    2 seconds of processor time for a rendering, 512 MiB of memory and 4,194,304 characters of output.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        """`templates` is one source, or several by name ("default", "tool_use").

        Raises ConfigError if one is no Jinja template.
        """
        self.templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        if "default" not in self.templates:
            raise ConfigError(f"chat_template has only {sorted(self.templates)}; one must be named default")
        self.variables = {name: _names_read(source) for name, source in self.templates.items()}
        """The names that each template reads, such as enable_thinking."""
        self._special_tokens = dict(special_tokens or {})
        self._process = _Renderer(self.templates, max_seconds)

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> ChatTemplate | None:
        """The template of a folder: chat_template.jinja, else the field of tokenizer_config.json; None if there is neither."""
        folder = Path(path)
        config = read_config(folder)
        source: Any = read_text(folder / "chat_template.jinja", MAX_TEMPLATE_BYTES)
        if source is None:
            source = config.get("chat_template")
        if source is None:
            return None
        if isinstance(source, list):
            source = _by_name(source)
        if not isinstance(source, str | dict):
            raise ConfigError("tokenizer_config.json: chat_template must be a string or a list of named templates")
        return cls(source, special_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation; raises RequestError naming the message or argument that is wrong.

        `messages` have a `role` (system, user, assistant, tool) and a `content`: a string, or OpenAI's list of text parts, which
        are joined by line feeds. An assistant's content may be None beside `tool_calls`. `enable_thinking` None leaves the choice
        to the template. Other keyword arguments go to the template, which must read them.
        """
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        for flag, value in (("add_generation_prompt", add_generation_prompt), ("enable_thinking", enable_thinking)):
            if not isinstance(value, bool) and not (value is None and flag == "enable_thinking"):
                raise RequestError(f"{flag} is {str(value)[:40]!r} ({type(value).__name__}); it must be true or false")
        if enable_thinking is not None:
            kwargs["enable_thinking"] = enable_thinking
        for argument in kwargs:
            if argument not in self.variables[name]:
                raise RequestError(f"{argument} is not an argument of this model's chat template; leave it out")
        variables = {
            **self._special_tokens,
            "documents": None,
            **kwargs,
            "messages": check_messages(messages),
            "tools": check_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._process.render(name, variables)

    def close(self) -> None:
        """End the process that renders; a later `render` starts another."""
        self._process.close()


def _by_name(templates: list[Any]) -> dict[str, str]:
    named = {}
    for entry in templates:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise ConfigError("tokenizer_config.json: every entry of chat_template must have a name and a template")
        named[entry["name"]] = entry["template"]
    return named


def _names_read(source: str) -> frozenset[str]:
    """Parses only: nothing of the template is evaluated in this process, not even its constants."""
    import jinja2
    import jinja2.nodes

    from .template_worker import environment

    if len(source) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"chat_template has {len(source)} characters; at most {MAX_TEMPLATE_BYTES} are read")
    try:
        tree = environment().parse(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(
            f"chat_template is no Jinja template ({str(error)[:200]}); copy it again from the checkpoint"
        ) from None
    return frozenset(node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "load")


class _Renderer:
    """The process that renders, started when it is needed and again after it ended."""

    def __init__(self, templates: Mapping[str, str], max_seconds: float) -> None:
        self._templates = templates
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[..., Any] | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        line = _json_line({"template": template, "variables": variables})
        if len(line) > MAX_REQUEST_BYTES:
            raise RequestError(
                f"messages and tools have {len(line)} bytes as JSON; at most {MAX_REQUEST_BYTES} are rendered"
            )
        with self._lock:
            try:
                reply = self._exchange(line)
            except BaseException:
                self._end()
                raise
        if "text" not in reply:
            raise RequestError(f"the chat template refused these messages: {reply.get('error')}")
        return str(reply["text"])

    def close(self) -> None:
        with self._lock:
            self._end()

    def _exchange(self, line: bytes) -> dict[str, Any]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        fresh = self._process is None
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if fresh:
                process.stdin.write(_json_line(self._templates))
            process.stdin.write(line)
            process.stdin.flush()
            reply = self._read_line(process.stdout.fileno())
        except BrokenPipeError:
            reply = b""
        if not reply:
            raise RequestError(self._why_silent(process))
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def _why_silent(self, process: subprocess.Popen[bytes]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=1)
            if code != -signal.SIGPROF:
                return f"the process that renders the chat template ended with code {code}; check the installation of jinja2"
        return f"the chat template took more than {self._max_seconds:g} s; shorten the messages"

    def _read_line(self, descriptor: int) -> bytes:
        """One line, or nothing if the process ended, gave more than an answer can have, or let the clock run out."""
        deadline = time.monotonic() + self._max_seconds * _WAIT_FACTOR
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        read = bytearray()
        # A character takes at most twelve bytes as JSON: two escaped surrogates.
        while len(read) <= 12 * MAX_TEXT_CHARS + 1024 and poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            piece = os.read(descriptor, 1 << 20)
            read += piece
            if piece.endswith(b"\n"):
                return bytes(read)
            if not piece:
                break
        return b""

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", str(Path(__file__).with_name("template_worker.py"))]
        limits = [str(MAX_MEMORY_BYTES), str(MAX_TEXT_CHARS), str(self._max_seconds)]
        try:
            # A session of its own: Ctrl-C is for this process, which closes the pipe when it ends.
            process = subprocess.Popen(
                command + limits,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"cannot start {sys.executable} to render chat templates: {error.strerror}") from None
        self._process = process
        self._stop = weakref.finalize(self, _stop, process)
        return process

    def _end(self) -> None:
        if self._stop is not None:
            self._stop()
            self._process = self._stop = None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _json_line(value: object) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        raise RequestError("messages have a lone surrogate; they must be valid Unicode") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"messages, tools and template arguments must be JSON values: {str(error)[:200]}") from None
