"""The command line itself: help, exit statuses, one line for a failure, nothing on stdout but the answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from qwenrt.plugins import ConfigError
from qwenrt.tools import cli

from .command import ENVIRONMENT, qwenrt
from .conftest import Here

HEAVY = ("torch", "transformers", "onnx", "onnxscript", "numpy", "onnxruntime", "tokenizers")


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    status, stdout, stderr = qwenrt("--help", blocked=HEAVY)
    assert (status, stderr) == (0, "")
    for name, (_, summary) in cli.COMMANDS.items():
        assert f"  {name} " in stdout
        assert summary[:40] in stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_examples_and_the_summary_as_its_first_line(name: str) -> None:
    status, stdout, stderr = qwenrt(name, "--help", blocked=("torch", "transformers", "onnx", "onnxscript"))
    assert (status, stderr) == (0, "")
    assert f"Examples:\n    qwenrt {name} " in stdout
    command = cli.group.get_command(click.Context(cli.group), name)
    assert command is not None
    assert command.help is not None
    assert command.help.split("\n")[0] == cli.COMMANDS[name][1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["generate"],
        ["generate", "engine"],
        ["generate", "engine", "prompt", "--no-such-option"],
        ["generate", "engine", "prompt", "--max-tokens", "many"],
        ["generate", "engine", "prompt", "--max-tokens", "0"],
        ["generate", "engine", "prompt", "--temperature", "nan"],
        ["generate", "engine", "prompt", "--temperature", "-1"],
        ["generate", "engine", "prompt", "--top-p", "0"],
        ["generate", "engine", "prompt", "--stop", ""],
        ["generate", "engine", "prompt", "-n", "0"],
        ["generate", "engine", "prompt", "--logprobs", "2"],
        ["generate", "engine", "prompt", "--system", "s"],
        ["generate", "engine", "prompt", "--no-thinking"],
        ["generate", "engine", "prompt", "--backend", "magic"],
        ["generate", "engine", "prompt", "--kv-memory", "1 apple"],
        ["generate", "engine", "prompt", "--prompts-file", "-"],
        ["generate", "engine", "\udcff"],
        ["embed", "engine"],
        ["embed", "engine", "text", "--dimensions", "0"],
        ["embed", "engine", "text", "--texts-file", "-"],
        ["embed", "engine", "text", "--instruction", "\udcff"],
        ["generate", "engine", "prompt", "--chat", "--system", "\udcff"],
        ["chat", "engine", "--top-k", "-2"],
        ["bench", "engine", "--repeats", "0"],
        ["make-checkpoint", "1B", "out"],
        ["make-checkpoint", "0.6B", "out", "--num-heads", "3"],
        ["make-checkpoint", "0.6B", "out", "--max-shard-size", "0"],
        ["export", "checkpoint"],
        ["export", "checkpoint", "out", "--weights", "int3"],
        ["export", "checkpoint", "out", "--block-size", "x"],
        ["export", "checkpoint", "out", "--max-model-len", "0"],
        ["generate", "engine", "prompt", "--threads", "0"],
    ],
    ids=lambda arguments: ascii(" ".join(arguments)),
)
def test_bad_usage_exits_2_and_says_what_is_wrong(arguments: list[str], here: Here) -> None:
    status, stdout, stderr = here(*arguments)
    assert (status, stdout) == (2, "")
    assert stderr.startswith("Usage: qwenrt ")
    assert stderr.splitlines()[-1].startswith("Error: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "no-such-engine", "prompt"],
        ["chat", "no-such-engine"],
        ["bench", "no-such-engine"],
        ["inspect", "no-such-engine"],
    ],
)
def test_a_failure_exits_1_with_one_line(arguments: list[str], here: Here) -> None:
    status, stdout, stderr = here(*arguments)
    assert (status, stdout) == (1, "")
    assert stderr.startswith("qwenrt: error: ")
    assert stderr.count("\n") == 1
    assert "no-such-engine" in stderr


@pytest.mark.parametrize(
    "arguments", [["--debug", "inspect", "no-such-engine"], ["inspect", "no-such-engine", "--debug"]]
)
def test_debug_shows_the_traceback(arguments: list[str]) -> None:
    status, stdout, stderr = qwenrt(*arguments)
    assert (status, stdout) == (1, "")
    assert stderr.startswith("Traceback (most recent call last):")
    assert "ConfigError: no-such-engine is no folder" in stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("a\nb\x1b[31m"), "a b\\x1b[31m"),
        (FileNotFoundError(2, "No such file or directory", "x"), "x: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError(), "out of memory; lower --kv-memory or take a smaller model"),
        (KeyError("k"), "internal error, KeyError: 'k' (--debug shows where)"),
    ],
)
def test_any_exception_becomes_one_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, here: Here
) -> None:
    def fail(ctx: click.Context) -> None:
        raise error

    monkeypatch.setattr(cli.group, "invoke", fail)
    assert here("inspect", "x") == (1, "", f"qwenrt: error: {line}\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    line = f"{sys.executable} -m qwenrt.tools.cli --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout in ("141\n", "0\n")


def test_a_full_disk_behind_stdout_is_named() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "qwenrt.tools.cli", "--help"],
            env=ENVIRONMENT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (1, "qwenrt: error: No space left on device\n")
