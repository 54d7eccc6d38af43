"""How answers end, and what text they have then, through the whole engine (CASES L06, P03, P04, P06)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from qwenrt.runtime import LLM, SamplingParams

from .forced import bytes_of, forced, load


@pytest.fixture(scope="module")
def llm(tiny_engine: Path) -> LLM:
    return load(tiny_engine)


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **{"max_tokens": 40, "ignore_eos": True, **fields})


@pytest.mark.parametrize(("eos", "ends_at"), [((7, 5), 0), ((5,), 0), ((9,), 1), ((), None)])
def test_any_end_of_text_token_ends_the_answer(llm: LLM, eos: tuple[int, ...], ends_at: int | None) -> None:
    engine = llm.engine
    real, engine.manifest = engine.manifest, dataclasses.replace(engine.manifest, eos_token_ids=eos)
    try:
        answer = forced(llm, [5, 9], greedy(max_tokens=4, ignore_eos=False))[0].outputs[0]
    finally:
        engine.manifest = real
    if ends_at is None:
        assert (answer.finish_reason, answer.token_ids) == ("length", [5, 9, 0, 0])
    else:
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        assert answer.token_ids == [5, 9][: ends_at + 1]


def test_a_stop_token_ends_the_answer_and_is_not_in_its_text(llm: LLM) -> None:
    params = greedy(stop_token_ids=[ord("!")])
    answer = forced(llm, bytes_of("hi! there"), params)[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hi", "stop", ord("!"))
    assert answer.token_ids == bytes_of("hi!")


def test_min_tokens_holds_every_ending_back(llm: LLM) -> None:
    params = greedy(stop_token_ids=[ord("b")], stop=["a"], min_tokens=3, max_tokens=5)
    answer = forced(llm, bytes_of("ababa"), params)[0].outputs[0]
    assert len(answer.token_ids) >= 3


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "reason"),
    [
        ("The quick brown fox jumps", ["own fox"], "The quick br", "stop"),
        ("The quick brown fox jumps", ["own foxes"], "The quick brown fox jumps", "length"),
        ("aaab", ["aab", "ab"], "a", "stop"),
        ("hello", ["h"], "", "stop"),
        ("hello", ["o"], "hell", "stop"),
        ("see 👋🏽 there", ["👋🏽"], "see ", "stop"),
        ("plain text", [f"stop {i}" for i in range(1000)], "plain text", "length"),
    ],
)
def test_a_stop_string_ends_the_answer_whatever_tokens_it_is_made_of(
    llm: LLM, tokens: str, stop: list[str], text: str, reason: str
) -> None:
    ids = bytes_of(tokens)
    output, texts = forced(llm, ids, greedy(stop=stop, max_tokens=len(ids)))
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason) == (text, reason)
    assert all(answer.text.startswith(shown) for shown in texts), "a stream showed text that was taken back"


def test_a_stop_string_can_be_kept(llm: LLM) -> None:
    params = greedy(stop=["own fox"], include_stop_str_in_output=True)
    answer = forced(llm, bytes_of("The quick brown fox jumps"), params)[0].outputs[0]
    assert (answer.text, answer.stop_reason) == ("The quick brown fox", "own fox")


def test_a_stop_on_the_last_allowed_token_is_a_stop(llm: LLM) -> None:
    for params in (greedy(stop=["c"], max_tokens=3), greedy(stop_token_ids=[ord("c")], max_tokens=3)):
        assert forced(llm, bytes_of("abcd"), params)[0].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "data",
    [
        "Swift 社区".encode(),
        "삼겹살 👋🏽 👨‍👩‍👧 e\u0301 \ufffd".encode(),
        b"a\xe7",
        b"a\xffb",
        b"\x80" * 40,
    ],
)
def test_streamed_text_never_has_half_a_character_and_joins_to_the_whole(llm: LLM, data: bytes) -> None:
    output, texts = forced(llm, list(data), greedy(max_tokens=len(data)))
    whole = data.decode("utf-8", "replace")
    assert output.outputs[0].text == whole
    assert texts[-1] == whole
    for shown in texts:
        assert whole.startswith(shown)
    assert len(texts) == len(data)


def test_invalid_bytes_do_not_stall_the_stream(llm: LLM) -> None:
    _, texts = forced(llm, [0x80] * 40, greedy(max_tokens=40))
    assert [len(text) for text in texts] == list(range(1, 41))


def test_logprobs_are_finite_and_belong_to_the_tokens(llm: LLM) -> None:
    answer = forced(llm, bytes_of("abc"), greedy(logprobs=5, max_tokens=3))[0].outputs[0]
    assert answer.logprobs is not None
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    for entry in answer.logprobs:
        assert -1e4 < entry.logprob <= 0.0
        assert len(entry.top) == 5
        assert entry.top[entry.token_id] == entry.logprob
    assert answer.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in answer.logprobs))


def test_a_model_that_gives_nan_aborts_the_request_and_says_why(llm: LLM) -> None:
    class Broken:
        def execute(self, inputs: Any) -> Any:
            import numpy as np

            return np.full((len(inputs.logits_indices), 320), np.nan, np.float32)

    engine = llm.engine
    real, engine.backend = engine.backend, Broken()
    try:
        answer = llm.generate("abc", greedy())[0].outputs[0]
    finally:
        engine.backend = real
    assert (answer.finish_reason, answer.token_ids) == ("abort", [])
    assert "nan" in str(answer.stop_reason)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
