"""`qwenrt bench --url` against servers that answer in chosen ways: what it asks, what it counts, what it says when they fail."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from qwenrt.tools.load.load import Load, LogNormal, Range
from qwenrt.tools.load.trace import Slo, Trace, median_summary, summarize

from .conftest import Here
from .openai_server import Events, Respond, Serve


def answer(tokens: int, pause: float = 0.0) -> Events:
    events: Events = []
    for _ in range(tokens):
        events += [{"choices": [{"text": "a"}]}, pause]
    return [*events, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}}]


def test_a_closed_loop_keeps_its_clients_busy_and_counts_what_the_server_counts(serve: Serve, here: Here) -> None:
    server = serve(lambda body: answer(body["max_tokens"], 0.002))
    options = ("--url", server.url, "--concurrency", "4", "--requests", "12", "--words", "5-9", "--new-tokens", "3")
    status, stdout, stderr = here("bench", *options, "--api-key", "secret")
    assert status == 0
    assert "4 clients" in stderr
    (run,) = json.loads(stdout)["runs"]
    assert (run["requests"], run["failed"], run["prompt_tokens"], run["output_tokens"]) == (12, 0, 12 * 7, 12 * 3)
    assert run["output_tokens_per_s"] == pytest.approx(36 / run["seconds"])
    assert 0 < run["itl_ms"]["p50"] <= run["itl_ms"]["p99"]
    assert run["ttft_ms"]["p50"] <= run["e2e_ms"]["p50"]
    assert server.most_in_flight == 4
    assert len(server.bodies) == 1 + 12
    assert {(body["path"], body["key"], body["model"]) for body in server.bodies} == {
        ("/v1/completions", "Bearer secret", "the-model")
    }
    assert all(
        body["stream"] and body["ignore_eos"] and body["stream_options"]["include_usage"] for body in server.bodies
    )
    assert all(5 <= len(body["prompt"].split()) <= 9 for body in server.bodies)
    assert len({body["prompt"] for body in server.bodies}) > 10


def test_an_open_loop_sends_when_due_and_counts_the_wait_for_a_slow_server(serve: Serve, here: Here) -> None:
    server = serve(lambda body: answer(1, 0.2))
    options = ("--url", server.url, "--rate", "200", "--requests", "20", "--new-tokens", "1", "--model", "m")
    status, stdout, _ = here("bench", *options)
    assert status == 0
    assert server.most_in_flight > 10
    (run,) = json.loads(stdout)["runs"]
    assert (run["rate"], run["concurrency"]) == (200, None)


def test_prompts_share_their_beginning_when_asked(serve: Serve, here: Here) -> None:
    server = serve(lambda body: answer(1))
    options = ("--url", server.url, "--concurrency", "1", "--requests", "3", "--shared-words", "50", "--words", "4")
    assert here("bench", *options)[0] == 0
    prompts = [body["prompt"].split() for body in server.bodies[1:]]
    assert len({tuple(words[:50]) for words in prompts}) == 1
    assert len({tuple(words) for words in prompts}) == 3


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (lambda body: 503, "status 503"),
        (lambda body: [{"error": {"message": "the engine failed"}}], "the engine failed"),
        (lambda body: [{"choices": [{"text": "a"}]}], "ended without usage"),
    ],
)
def test_failed_requests_are_counted_and_end_in_an_error(
    serve: Serve, here: Here, respond: Respond, message: str
) -> None:
    status, stdout, stderr = here("bench", "--url", serve(respond).url, "--concurrency", "2", "--requests", "4")
    assert status == 1
    assert "4 of 4 requests failed" in stderr
    assert message in stderr
    assert json.loads(stdout)["runs"][0]["failed"] == 4


def test_a_server_that_is_not_there_is_one_line(here: Here) -> None:
    status, stdout, stderr = here("bench", "--url", "http://127.0.0.1:9/v1")
    assert (status, stdout) == (1, "")
    assert "http://127.0.0.1:9/v1/models names no model" in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give an ENGINE folder, or --url"),
        (("engine", "--url", "http://localhost:1/v1"), "give an ENGINE folder, or --url"),
        (("--url", "http://localhost:1/v1", "--threads", "2"), "--threads says nothing about a server"),
        (("engine", "--rate", "2"), "--rate says nothing without --workload mix"),
        (("engine", "--workload", "decode", "--concurrency", "2"), "--concurrency says nothing without --workload mix"),
        (("engine", "--model", "m"), "--model says nothing about an engine folder"),
        (("--url", "http://localhost:1/v1", "--workload", "mix"), "--workload says nothing about a server"),
        (("--url", "http://localhost:1/v1", "--words", "lognormal:9:1:3"), "'lognormal:9:1:3' is no size"),
        (("--url", "localhost:1"), "it looks like http://"),
        (("--url", "http://localhost:1/v1", "--words", "9-3"), "'9-3' is no size"),
    ],
)
def test_options_that_do_not_go_together_are_bad_usage(here: Here, arguments: tuple[str, ...], message: str) -> None:
    status, stdout, stderr = here("bench", *arguments)
    assert (status, stdout) == (2, "")
    assert message in " ".join(stderr.split())


def test_a_load_is_the_same_for_the_same_seed_and_arrives_at_its_rate() -> None:
    def make(seed: int) -> Load:
        return Load(requests=2000, words=Range(1, 3), new_tokens=Range(4, 8), shared_words=0, rate=50.0, seed=seed)

    works = list(make(1))
    assert works == list(make(1)) != list(make(2))
    assert works[-1].due == pytest.approx(40, rel=0.1)
    assert {work.max_tokens for work in works} == {4, 5, 6, 7, 8}


def test_log_normal_sizes_have_their_median_their_spread_and_their_most() -> None:
    rng = random.Random(5)
    sizes = sorted(LogNormal(100, 0.8, 1000).draw(rng) for _ in range(20_000))
    assert sizes[10_000] == pytest.approx(100, rel=0.05)
    assert math.log(sizes[16_827] / 100) == pytest.approx(0.8, rel=0.05)  # 84.13 %: one sigma above
    assert sizes[0] >= 1
    assert sizes[-1] == 1000


def test_a_summary_is_of_the_answered_requests() -> None:
    traces = [
        Trace(0.0, [0.1, 0.2, 0.4], 0.5, prompt_tokens=10, cached_tokens=4, completion_tokens=3),
        Trace(1.0, [1.3], 2.0, prompt_tokens=10, completion_tokens=1),
        Trace(1.0, [], 1.5, error="status 429"),
    ]
    slo = Slo(ttft=0.35, tpot=0.2)
    result = summarize(traces, slo)
    assert (result["requests"], result["failed"], result["errors"]) == (3, 1, {"status 429": 1})
    assert result["output_tokens_per_s"] == pytest.approx(4 / 2.0)
    assert result["ttft_ms"]["mean"] == pytest.approx((100 + 300) / 2)
    assert result["itl_ms"]["mean"] == pytest.approx(150)
    assert result["cached_share"] == 0.2
    assert result["goodput_per_s"] == pytest.approx(2 / 2.0)
    assert result["slo_share"] == pytest.approx(2 / 3)
    assert summarize(traces, Slo(ttft=0.2, tpot=0.2))["goodput_per_s"] == pytest.approx(0.5)
    assert summarize(traces, Slo(ttft=0.35, tpot=0.1))["goodput_per_s"] == pytest.approx(0.5)
    assert summarize(traces[2:], slo) == {"requests": 1, "failed": 1, "errors": {"status 429": 1}}


def test_several_runs_of_a_load_are_their_medians() -> None:
    runs = [
        {"failed": count, "errors": {"x": count} if count else {}, "itl_ms": {"p50": 10.0 * count}, "e2e_ms": None}
        for count in (0, 3, 1)
    ]
    assert median_summary(runs) == {"failed": 1, "errors": {"x": 4}, "itl_ms": {"p50": 10.0}, "e2e_ms": None}


def test_plots_of_a_server_are_drawn(serve: Serve, here: Here, tmp_path: Path) -> None:
    server = serve(lambda body: answer(4, 0.002))
    options = ("--concurrency", "1", "--concurrency", "2", "--requests", "4", "--plots", tmp_path / "plots")
    assert here("bench", "--url", server.url, *options)[0] == 0
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["latency.png", "throughput.png"]
