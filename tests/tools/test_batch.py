"""`qwenrt batch`: each row is answered once and as the engine answers it alone, however often the command was killed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from qwenrt.runtime import LLM, SamplingParams

from .batch_file import chat_row, contents, examples, read_answers, write_rows
from .command import qwenrt, start
from .conftest import Here


def test_answers_are_those_of_the_engine_alone(demo_engine: Path, here: Here, tmp_path: Path) -> None:
    chosen = examples(60)
    rows = [chat_row(f"row {index} é", example) for index, example in enumerate(chosen)]
    status, stdout, stderr = here("batch", demo_engine, write_rows(tmp_path / "in", rows), tmp_path / "out")
    assert (status, stdout) == (0, "")
    assert stderr == "60 rows done, 0 of them with an error; 0 were there already\n"
    llm = LLM(demo_engine, num_kv_blocks=512)
    texts = [
        llm.chat(
            example.messages, SamplingParams(max_tokens=60, temperature=0), enable_thinking=example.enable_thinking
        )
        for example in chosen
    ]
    answers = contents(tmp_path / "out")
    for index, (output,) in enumerate(texts):
        assert answers[f"row {index} é"] == output.outputs[0].text.removeprefix("<think>\n\n</think>\n\n")
    (line,) = (one for one in read_answers(tmp_path / "out") if one["custom_id"] == "row 0 é")
    assert line["id"].startswith("batch_req_") and line["error"] is None
    assert line["response"]["status_code"] == 200 and line["response"]["request_id"]


def test_completions_and_several_answers_are_rows_too(demo_engine: Path, here: Here, tmp_path: Path) -> None:
    body = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 3, "seed": 1, "temperature": 1.0, "model": "it"}
    row = {"custom_id": "a", "url": "/v1/completions", "body": body}
    path = write_rows(tmp_path / "in", [row])
    assert here("batch", demo_engine, path, tmp_path / "out", "--served-model-name", "it")[0] == 0
    (answer,) = read_answers(tmp_path / "out")
    assert len(answer["response"]["body"]["choices"]) == 4


def test_a_line_that_is_wrong_gets_a_line_with_an_error_and_the_others_go_on(
    demo_engine: Path, here: Here, tmp_path: Path
) -> None:
    good = examples(2)
    lines = [
        b"\xef\xbb\xbf" + b"{not json",
        b"[1]",
        b'{"custom_id": "utf8", "url": "\xff"}',
        b"[" * 100_000,
        b'{"custom_id": "' + b"x" * (5 << 20) + b'"}',
        b"   ",
        {"url": "/v1/completions", "body": {}},
        {"custom_id": 7, "url": "/v1/completions", "body": {}},
        {"custom_id": "x" * 513, "url": "/v1/completions", "body": {}},
        chat_row("method", good[0]) | {"method": "GET"},
        chat_row("url", good[0]) | {"url": "/v1/files"},
        chat_row("body", good[0]) | {"body": "text"},
        chat_row("stream", good[0], stream=True),
        chat_row("\ud800", good[0]),
        chat_row("\ud800", good[1]),
        chat_row("field", good[0], temprature=1),
        chat_row("value", good[0], temperature=-1),
        chat_row("model", good[0], model="gpt-4o"),
        chat_row("nan", good[0], temperature=float("nan")),
        chat_row("last", good[1]),
    ]
    path = write_rows(tmp_path / "in", lines)
    status, stdout, stderr = here("batch", demo_engine, path, tmp_path / "out")
    assert (status, stdout) == (1, "")
    assert stderr.splitlines() == [
        "19 rows done, 17 of them with an error; 0 were there already",
        f"qwenrt: error: 17 of the 19 rows in {tmp_path / 'out'} tell of an error",
    ]
    answers = read_answers(tmp_path / "out")
    codes = {one["error"]["line"]: one["error"]["code"] for one in answers if one["error"]}
    assert codes == {
        **dict.fromkeys((1, 2, 3, 4), "invalid_json_line"),
        5: "line_too_long",
        7: "missing_custom_id",
        **dict.fromkeys((8, 9), "invalid_custom_id"),
        10: "invalid_method",
        11: "invalid_url",
        **dict.fromkeys((12, 13), "invalid_body"),
        15: "duplicate_custom_id",
    }
    responses = {one["custom_id"]: one["response"] for one in answers if one["response"]}
    statuses = {name: response["status_code"] for name, response in responses.items()}
    assert statuses == {"\ud800": 200, "field": 400, "value": 400, "model": 404, "nan": 400, "last": 200}
    assert "temprature" in responses["field"]["body"]["error"]["message"]
    before = (tmp_path / "out").read_bytes()
    status, _, stderr = here("batch", demo_engine, path, tmp_path / "out")
    assert status == 1 and "0 rows done" in stderr and "19 were there already" in stderr
    assert (tmp_path / "out").read_bytes() == before


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_ended_goes_on_where_it_was(demo_engine: Path, tmp_path: Path, signum: signal.Signals) -> None:
    chosen = examples(120)
    rows = [chat_row(f"{index}", example) for index, example in enumerate(chosen)]
    path, out = write_rows(tmp_path / "in", rows), tmp_path / "out"
    process = start("batch", demo_engine, path, out, "--max-num-seqs", "2")
    deadline = time.monotonic() + 120
    while (not out.exists() or out.stat().st_size < 15_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=120)
    if signum == signal.SIGINT:
        assert (process.returncode, stderr) == (130, b"qwenrt: error: interrupted\n")
    else:
        assert process.returncode == -signal.SIGKILL
    before = out.read_bytes()
    assert before.endswith(b"\n") and before.count(b"\n") < 120
    # What a write that was cut short would leave.
    out.write_bytes(before + b'{"id":"batch_req_12","custom_id":"39')
    status, _, stderr_text = qwenrt("batch", demo_engine, path, out)
    assert status == 0, stderr_text
    assert f"{before.count(10)} were there already" in stderr_text
    assert out.read_bytes().startswith(before)
    answers = contents(out)
    assert answers.keys() == {row["custom_id"] for row in rows}
    assert all(answers.values())


def test_an_output_that_is_something_else_is_not_touched(demo_engine: Path, here: Here, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in", [chat_row("a", examples(1)[0])])
    for text in ("my notes", "my notes\n", '{"custom_id": "a"}\n', '{"id":"x"}\n{"id"'):
        out = tmp_path / "out"
        out.write_text(text)
        status, _, stderr = here("batch", demo_engine, path, out)
        assert status == 1 and stderr.count("\n") == 1 and "move" in stderr, stderr
        assert out.read_text().startswith(text.rpartition("\n")[0])
    assert here("batch", demo_engine, path, path)[0] == 2
    assert here("batch", demo_engine, tmp_path / "none", tmp_path / "new")[0] == 2


def test_two_runs_do_not_write_to_one_output(demo_engine: Path, here: Here, tmp_path: Path) -> None:
    from qwenrt.runtime.batch import ResultFile

    path = write_rows(tmp_path / "in", [chat_row("a", examples(1)[0])])
    with ResultFile(tmp_path / "out"):
        status, _, stderr = here("batch", demo_engine, path, tmp_path / "out")
    assert status == 1 and "is being written by another qwenrt batch" in stderr
    assert (tmp_path / "out").read_bytes() == b""


def test_rows_that_begin_alike_meet_the_prefix_cache(demo_engine: Path, here: Here, tmp_path: Path) -> None:
    prefixes = [[(seed * 7919 + place * 31) % 700 + 10 for place in range(256)] for seed in range(40)]
    rows = [
        {
            "custom_id": f"{question}-{index}",
            "url": "/v1/completions",
            "body": {"prompt": [*prefix, question + 10], "max_tokens": 1},
        }
        for question in range(8)
        for index, prefix in enumerate(prefixes)
    ]
    # In the order of the file, the pool would have forgotten each prefix before it comes again.
    path = write_rows(tmp_path / "in", rows)
    assert here("batch", demo_engine, path, tmp_path / "out", "--num-kv-blocks", "128", "--max-num-seqs", "4")[0] == 0
    usages = [one["response"]["body"]["usage"] for one in read_answers(tmp_path / "out")]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached >= 0.9 * 7 / 8 * sum(usage["prompt_tokens"] - 1 for usage in usages)


def test_without_the_extra_it_says_what_to_install(demo_engine: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in", [])
    status, _, stderr = qwenrt("batch", demo_engine, path, tmp_path / "out", blocked=("fastapi",))
    assert status == 1
    assert stderr == "qwenrt: error: this needs fastapi; install it with: pip install 'qwenrt[serve]'\n"
