"""`qwenrt generate` as a process: what it prints, what it refuses, how it stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qwenrt.runtime import LLM, SamplingParams

from .command import ENVIRONMENT, qwenrt, start
from .conftest import Here

NO_EXPORT_EXTRA = ("torch", "transformers", "onnx", "onnxscript", "huggingface_hub")
PROMPTS = ["The quick brown fox", "a", "héllo 社区 👋🏽"]


@pytest.fixture(scope="module")
def answers(tiny_engine: Path) -> list[str]:
    """What the Python API answers to PROMPTS."""
    outputs = LLM(tiny_engine).generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    return [output.outputs[0].text for output in outputs]


def as_process(engine: Path, *arguments: str | bytes, **more: Any) -> tuple[int, str, str]:
    return qwenrt("generate", engine, *arguments, "--max-tokens", "12", "--ignore-eos", **more)


@pytest.fixture
def generate(here: Here) -> Here:
    """Runs `qwenrt generate` inside this process."""

    def run(engine: Path, *arguments: str | Path, stdin: str = "") -> tuple[int, str, str]:
        return here("generate", engine, *arguments, "--max-tokens", "12", "--ignore-eos", stdin=stdin)

    return run


def test_one_answer_and_nothing_else_goes_to_stdout(tiny_engine: Path, answers: list[str]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert as_process(tiny_engine, prompt) == (0, answer + "\n", "")


def test_speculation_leaves_the_answer_as_it_is(generate: Here, tiny_engine: Path, answers: list[str]) -> None:
    assert generate(tiny_engine, PROMPTS[0], "--speculative-tokens", "4") == (0, answers[0] + "\n", "")
    status, stdout, stderr = generate(tiny_engine, PROMPTS[0], "--speculative-tokens", "0")
    assert (status, stdout) == (1, "")
    assert "num_speculative_tokens is 0, must be 1 to 64" in stderr


def test_it_runs_without_what_only_an_export_needs(tiny_engine: Path, answers: list[str]) -> None:
    assert as_process(tiny_engine, PROMPTS[0], blocked=NO_EXPORT_EXTRA) == (0, answers[0] + "\n", "")
    status, stdout, stderr = as_process(tiny_engine, PROMPTS[0], "--chat", blocked=NO_EXPORT_EXTRA)
    assert (status, stderr) == (0, "")
    assert stdout


def test_the_runtime_imports_without_what_only_an_export_needs() -> None:
    program = (
        "import sys, time\n"
        f"sys.modules.update(dict.fromkeys({NO_EXPORT_EXTRA!r}))\n"
        "start = time.process_time(); import qwenrt.runtime; print(time.process_time() - start)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2


def test_several_answers_come_in_order_under_their_prompts(
    generate: Here, tiny_engine: Path, answers: list[str]
) -> None:
    expected = "".join(
        f"=== {i}/3: {prompt}\n{answer}\n" for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True), 1)
    )
    assert generate(tiny_engine, *PROMPTS) == (0, expected, "")
    assert generate(tiny_engine, *PROMPTS, "--max-num-seqs", "1") == (0, expected, "")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_prompts_come_from_a_file_or_stdin_one_a_line(
    generate: Here, tiny_engine: Path, answers: list[str], tmp_path: Path, ending: str
) -> None:
    text = "\ufeff" + ending.join(PROMPTS) + ending
    file = tmp_path / "prompts.txt"
    file.write_bytes(text.encode())
    for status, stdout, stderr in (
        generate(tiny_engine, "--prompts-file", file, "--json"),
        as_process(tiny_engine, "--prompts-file", "-", "--json", stdin=text),
    ):
        assert (status, stderr) == (0, "")
        lines = [json.loads(line) for line in stdout.splitlines()]
        assert [line["prompt"] for line in lines] == PROMPTS
        assert [line["outputs"][0]["text"] for line in lines] == answers
    assert generate(tiny_engine, "--prompts-file", "-", stdin="") == (0, "", "")


def test_a_prompt_that_cannot_be_served_does_not_disturb_the_others(
    generate: Here, tiny_engine: Path, answers: list[str]
) -> None:
    long = "x" * 5000
    status, stdout, stderr = generate(tiny_engine, PROMPTS[0], "", long, PROMPTS[2], "--json")
    lines = [json.loads(line) for line in stdout.splitlines()]
    assert status == 1
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert [lines[i]["outputs"][0]["text"] for i in (0, 3)] == [answers[0], answers[2]]
    assert "prompt is empty" in lines[1]["error"]
    assert stderr.splitlines() == [
        f"qwenrt: error: prompt 2: {lines[1]['error']}",
        f"qwenrt: error: prompt 3: {lines[2]['error']}",
        "qwenrt: error: 2 of 4 prompts failed",
    ]
    status, stdout, stderr = generate(tiny_engine, "")
    assert (status, stdout.strip()) == (1, "")
    assert "prompt is empty" in stderr


def test_an_answer_that_the_engine_gives_up_on_is_a_failure(generate: Here, nan_engine: Path) -> None:
    status, stdout, stderr = generate(nan_engine, "a")
    assert (status, stdout) == (1, "\n")
    assert stderr.startswith("qwenrt: error: the model gave nan as a logit")
    status, stdout, stderr = generate(nan_engine, "a", "b", "--json")
    assert status == 1
    assert [json.loads(line)["outputs"][0]["finish_reason"] for line in stdout.splitlines()] == ["abort", "abort"]
    first, second, summary = stderr.splitlines()
    assert first.startswith("qwenrt: error: prompt 1: the model gave nan")
    assert second.startswith("qwenrt: error: prompt 2: the model gave nan")
    assert summary == "qwenrt: error: 2 of 2 prompts failed"


def test_a_file_that_is_not_utf_8_is_refused_with_the_place(tiny_engine: Path) -> None:
    status, stdout, stderr = as_process(tiny_engine, "--prompts-file", "-", stdin=b"abc\xff\n")
    assert (status, stdout) == (2, "")
    assert stderr.endswith("Error: --prompts-file <stdin> is not valid UTF-8 at byte 3\n")


def test_json_holds_tokens_logprobs_and_reasons(generate: Here, tiny_engine: Path, answers: list[str]) -> None:
    status, stdout, stderr = generate(tiny_engine, PROMPTS[0], "--json", "--logprobs", "2", "-n", "2", "--seed", "3")
    assert (status, stderr) == (0, "")
    line = json.loads(stdout)
    assert line["prompt_tokens"] > 0
    assert [output["index"] for output in line["outputs"]] == [0, 1]
    for output in line["outputs"]:
        assert output["text"] == answers[0]
        assert output["finish_reason"] == "length"
        assert output["stop_reason"] is None
        assert len(output["token_ids"]) == len(output["logprobs"]) == 12
        for token_id, token in zip(output["token_ids"], output["logprobs"], strict=True):
            assert token["token_id"] == token_id
            assert isinstance(token["token"], str)
            assert token["logprob"] == max(top["logprob"] for top in token["top"])
            assert len(token["top"]) == 2
        assert output["cumulative_logprob"] == pytest.approx(sum(token["logprob"] for token in output["logprobs"]))


def test_sampling_options_arrive(generate: Here, tiny_engine: Path, answers: list[str]) -> None:
    stop = answers[0][3:5]
    status, stdout, _ = generate(tiny_engine, PROMPTS[0], "--json", "--stop", stop)
    output = json.loads(stdout)["outputs"][0]
    assert (status, output["text"], output["finish_reason"], output["stop_reason"]) == (
        0,
        answers[0][: answers[0].index(stop)],
        "stop",
        stop,
    )
    arguments = ("--temperature", "1.5", "--top-p", "0.95", "--top-k", "50", "--min-p", "0.01", "--seed", "1")
    one, two = (generate(tiny_engine, PROMPTS[0], *arguments) for _ in range(2))
    assert one == two
    other = generate(tiny_engine, PROMPTS[0], *arguments[:-1], "2")
    assert one[0] == other[0] == 0
    assert one != other
    assert generate(tiny_engine, PROMPTS[0], "--stop-token-id", "999999999")[0] == 1


def test_several_answers_to_one_prompt_are_numbered(generate: Here, tiny_engine: Path, answers: list[str]) -> None:
    status, stdout, stderr = generate(tiny_engine, PROMPTS[0], "-n", "2")
    assert (status, stderr) == (0, "")
    assert stdout == f"--- answer 1/2\n{answers[0]}\n--- answer 2/2\n{answers[0]}\n"


def test_chat_puts_the_prompt_through_the_template(generate: Here, tiny_engine: Path) -> None:
    llm = LLM(tiny_engine)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": PROMPTS[0]}]
    rendered = llm.render(messages, enable_thinking=False)
    expected = llm.generate(rendered, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))[0]
    status, stdout, stderr = generate(tiny_engine, PROMPTS[0], "--chat", "--system", "s", "--no-thinking", "--json")
    assert (status, stderr) == (0, "")
    line = json.loads(stdout)
    assert line["prompt"] == PROMPTS[0]
    assert line["prompt_tokens"] == len(expected.prompt_token_ids)
    assert line["outputs"][0]["token_ids"] == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    "option", [("--max-num-seqs", "9999"), ("--num-kv-blocks", "9" * 20), ("--kv-memory", "1"), ("--threads", "9999")]
)
def test_an_engine_option_that_cannot_be_is_named(generate: Here, tiny_engine: Path, option: tuple[str, str]) -> None:
    status, stdout, stderr = generate(tiny_engine, "x", *option)
    assert (status, stdout) == (1, "")
    assert option[0][2:].replace("-", "_") in stderr


def test_torch_backend_without_torch_says_what_to_install(tiny_engine: Path) -> None:
    status, stdout, stderr = as_process(tiny_engine, "x", "--backend", "torch", blocked=NO_EXPORT_EXTRA)
    assert (status, stdout) == (1, "")
    assert "pip install 'qwenrt[export]'" in stderr
    assert stderr.count("\n") == 1


def start_long(engine: Path) -> subprocess.Popen[bytes]:
    """A process that has printed an answer and has thousands to go."""
    arguments = ("--prompts-file", "-", "--json", "--max-tokens", "100", "--ignore-eos")
    process = start("generate", engine, *arguments)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"some words\n" * 5000)
    process.stdin.close()
    process.stdin = None
    assert json.loads(process.stdout.readline())["index"] == 0
    return process


@pytest.mark.parametrize(
    ("signum", "status", "line"),
    [
        (signal.SIGINT, 130, b"qwenrt: error: interrupted\n"),
        (signal.SIGTERM, 143, b"qwenrt: error: terminated\n"),
    ],
)
def test_a_signal_ends_it_with_one_line(tiny_engine: Path, signum: int, status: int, line: bytes) -> None:
    process = start_long(tiny_engine)
    assert process.stdout is not None
    assert process.stderr is not None
    process.send_signal(signum)
    begin = time.monotonic()
    lines = process.stdout.read().splitlines()
    assert (process.stderr.read(), process.wait(timeout=60)) == (line, status)
    assert time.monotonic() - begin < 10
    assert [json.loads(text)["index"] for text in lines[:-1]] == list(range(1, len(lines)))


def test_it_ends_quietly_when_the_reader_goes_away(tiny_engine: Path) -> None:
    process = start_long(tiny_engine)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""


def test_text_that_the_terminal_cannot_show_is_replaced(tiny_engine: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "qwenrt.tools.cli",
        "generate",
        str(tiny_engine),
        PROMPTS[2],
        "x",
        "--max-tokens",
        "4",
    ]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"=== 1/2: h\xe9llo ?? ??\n")
