"""`qwenrt chat` over a pipe and at a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qwenrt.exporter import export
from qwenrt.runtime import LLM, SamplingParams

from ..checkpoints import write_checkpoint
from .command import ENVIRONMENT, qwenrt
from .conftest import Here
from .openai_server import Respond, Serve

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def chat(here: Here, tiny_engine: Path) -> Here:
    """Holds a conversation of the lines of `stdin`."""

    def run(stdin: str, *arguments: str) -> tuple[int, str, str]:
        return here("chat", tiny_engine, "--max-tokens", "8", "--ignore-eos", *arguments, stdin=stdin)

    return run


class Expected:
    """The same conversation through the Python API."""

    def __init__(self, engine: Path, system: str | None = None) -> None:
        self.llm = LLM(engine)
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, message: str, thinking: bool | None = None) -> str:
        self.messages.append({"role": "user", "content": message})
        text = self.llm.chat(self.messages, PARAMS, enable_thinking=thinking)[0].outputs[0].text
        self.messages.append({"role": "assistant", "content": text})
        return text + "\n"


@pytest.mark.parametrize("ending", ["", "/exit\nnever answered\n"])
def test_a_piped_conversation_remembers(chat: Here, tiny_engine: Path, ending: str) -> None:
    expected = Expected(tiny_engine)
    answers = expected.say("one") + expected.say("two")
    assert chat(f"one\n\n  two  \n{ending}") == (0, answers, "")


def test_the_last_line_needs_no_newline(chat: Here, tiny_engine: Path) -> None:
    assert chat("one") == (0, Expected(tiny_engine).say("one"), "")
    assert chat("") == (0, "", "")


def test_commands_switch_thinking_and_reset(chat: Here, tiny_engine: Path) -> None:
    expected = Expected(tiny_engine, "s")
    answers = expected.say("one", True) + expected.say("two", False)
    fresh = Expected(tiny_engine, "s").say("one", False)
    stdin = "/think\none\n/no_think\ntwo\n/reset\none\n"
    assert chat(stdin, "--system", "s") == (0, answers + fresh, "")


def test_a_line_with_a_slash_that_is_no_command_is_a_message(chat: Here, tiny_engine: Path) -> None:
    assert chat("/etc/hosts\n") == (0, Expected(tiny_engine).say("/etc/hosts"), "")


def test_a_message_that_is_too_long_is_reported_and_forgotten(chat: Here, tiny_engine: Path) -> None:
    expected = Expected(tiny_engine)
    answers = expected.say("one") + "\n" + expected.say("two")
    status, stdout, stderr = chat(f"one\n{'x' * 5000}\ntwo\n")
    assert (status, stdout.replace("\n\n", "\n")) == (1, answers.replace("\n\n", "\n"))
    first, last = stderr.splitlines()
    assert first.startswith("qwenrt: error: prompt has ")
    assert first.endswith("; /reset forgets the conversation")
    assert last == "qwenrt: error: some messages were not answered"


def test_an_answer_that_the_engine_gives_up_on_is_a_failure(here: Here, nan_engine: Path) -> None:
    status, stdout, stderr = here("chat", nan_engine, stdin="one\n")
    assert (status, stdout) == (1, "\n")
    assert stderr.startswith("qwenrt: error: the model gave nan as a logit")


def test_it_runs_as_a_process(tiny_engine: Path) -> None:
    status, stdout, stderr = qwenrt("chat", tiny_engine, "--max-tokens", "8", "--ignore-eos", stdin="one\n")
    assert (status, stdout, stderr) == (0, Expected(tiny_engine).say("one"), "")


def test_stdin_that_is_not_utf_8_is_refused(tiny_engine: Path) -> None:
    status, stdout, stderr = qwenrt("chat", tiny_engine, stdin=b"\xff\n")
    assert (status, stdout, stderr) == (1, "", "qwenrt: error: a line of stdin is not valid UTF-8\n")


class Terminal:
    """`qwenrt chat` at a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "qwenrt.tools.cli", "chat", *arguments]
        self.process = subprocess.Popen(
            command,
            env=ENVIRONMENT | {"TERM": "dumb"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(slave)

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def some(self, seconds: float = 60) -> bool:
        """Wait for any output; returns whether there is some."""
        return bool(select.select([self.master], [], [], seconds)[0])

    def until(self, text: str) -> str:
        """What it prints up to and including `text`."""
        seen = b""
        deadline = time.monotonic() + 60
        while text.encode() not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([self.master], [], [], 1)[0]:
                try:
                    seen += os.read(self.master, 4096)
                except OSError:
                    raise AssertionError(f"it ended after {seen!r}") from None
        return seen.decode()


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_stops_the_answer_and_ctrl_d_ends_the_chat(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", max_position_embeddings=40_000)
    export(checkpoint, tmp_path / "engine")
    terminal = Terminal(str(tmp_path / "engine"), "--ignore-eos", "--max-tokens", "1000000", "--kv-memory", "256MiB")
    assert "/reset forgets the conversation" in terminal.until("> ")
    for _ in range(2):
        terminal.send("hello\n")
        terminal.until("hello\r\n")
        assert terminal.some()
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("> ")
    terminal.send("\x04")
    assert terminal.process.wait(timeout=30) == 0
    os.close(terminal.master)


def test_ctrl_c_at_the_prompt_ends_the_chat(tiny_engine: Path) -> None:
    terminal = Terminal(str(tiny_engine))
    terminal.until("> ")
    for _ in range(10):
        # A signal between the prompt and the wait for a key is seen with the next one.
        terminal.process.send_signal(signal.SIGINT)
        if terminal.some(seconds=5):
            break
    assert "qwenrt: error: interrupted" in terminal.until("interrupted")
    assert terminal.process.wait(timeout=30) == 130
    os.close(terminal.master)


def delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"delta": fields}]}


def test_a_conversation_with_a_server_streams_and_remembers(serve: Serve, here: Here) -> None:
    server = serve(
        lambda body: [
            delta(role="assistant"),
            delta(reasoning_content="hm"),
            delta(reasoning_content="m"),
            delta(content=f"answer {len(body['messages'])}"),
        ]
    )
    options = ("--url", server.url, "--system", "s", "--thinking", "--max-tokens", "8", "--stop", "x")
    status, stdout, stderr = here("chat", *options, stdin="one\ntwo\n")
    answers = [f"<think>\nhmm\n</think>\n\nanswer {count}" for count in (2, 4)]
    assert (status, stdout, stderr) == (0, "".join(f"{answer}\n" for answer in answers), "")
    first, second = server.bodies
    assert first["path"] == "/v1/chat/completions"
    assert first["chat_template_kwargs"] == {"enable_thinking": True}
    assert (first["model"], first["temperature"], first["max_tokens"], first["stop"]) == ("the-model", 0.0, 8, ["x"])
    assert "top_k" not in first
    assert [message["content"] for message in second["messages"]] == ["s", "one", answers[0], "two"]


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (lambda body: 400, "the server answered 400: no room"),
        (lambda body: [delta(content="a"), {"error": {"message": "failed"}}], "the server ended the answer: failed"),
        (lambda body: [{}], "the answer broke off (KeyError"),
    ],
)
def test_a_message_that_a_server_refuses_is_reported_and_forgotten(
    serve: Serve, here: Here, respond: Respond, message: str
) -> None:
    server = serve(respond)
    status, _, stderr = here("chat", "--url", server.url, stdin="one\ntwo\n")
    assert status == 1
    assert message in stderr
    assert len(server.bodies[1]["messages"]) == 1


def test_a_chat_needs_an_engine_or_a_server(here: Here, tiny_engine: Path) -> None:
    for arguments in ((), (tiny_engine, "--url", "http://127.0.0.1:9/v1")):
        status, _, stderr = here("chat", *arguments)
        assert status == 2
        assert "give an ENGINE folder, or --url" in stderr
    status, _, stderr = here("chat", "--url", "http://127.0.0.1:9/v1")
    assert status == 1
    assert "http://127.0.0.1:9/v1/models names no model" in stderr
