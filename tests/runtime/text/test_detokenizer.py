"""Text comes out piece by piece as it does whole, in whole characters, and ends at stop strings (CASES P03, P04)."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenrt.runtime.sampling.params import SamplingParams
from qwenrt.runtime.text.detokenizer import IncrementalDetokenizer, OutputText
from qwenrt.runtime.text.tokenizer import Tokenizer

from .conftest import CONFIG, byte_backend

BYTES = Tokenizer(byte_backend(), CONFIG)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [detokenizer.push([i]) for i in ids] + [detokenizer.finish()]


HARD = {
    "chinese": ("Swift 社区".encode(), "Swift 社区"),
    "korean": ("삼겹살".encode(), "삼겹살"),
    "skin tone": ("👋🏽".encode(), "👋🏽"),
    "family": ("👨‍👩‍👧".encode(), "👨‍👩‍👧"),
    "decomposed": ("e\u0301".encode(), "e\u0301"),
    "replacement character itself": ("\ufffd".encode(), "\ufffd"),
    "lone byte at the end": (b"a\xe7", "a\ufffd"),
    "bad byte in the middle": (b"a\xffb", "a\ufffdb"),
    "60 bad bytes": (b"\xff" * 60, "\ufffd" * 60),
    "60 lone continuations": (b"\x80" * 60, "\ufffd" * 60),
    "60 lone starts": (b"\xe7" * 60, "\ufffd" * 60),
    "surrogate": (b"\xed\xa0\x80x", "\ufffd\ufffd\ufffdx"),
    "overlong": (b"\xc0\xafx", "\ufffd\ufffdx"),
    "cut emoji": (b"\xf0\x9f\x91", "\ufffd"),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_bytes_one_by_one(name: str) -> None:
    data, text = HARD[name]
    parts = pieces(BYTES, list(data))
    assert "".join(parts) == BYTES.decode(data) == text
    held = 0
    for byte, part in zip(data, parts, strict=False):
        held = 0 if part else held + 1
        assert held <= 3, f"stalled at {byte:#x}"
    if name != "replacement character itself" and "\ufffd" not in text:
        assert "\ufffd" not in "".join(parts)


@given(data=st.binary(max_size=80) | st.text(max_size=30).map(str.encode), special=st.booleans(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_whole(data: bytes, special: bool, skip: bool) -> None:
    ids = list(data)
    if special:
        rng = random.Random(len(data))
        for token_id in (257, 259):
            ids.insert(rng.randint(0, len(ids)), token_id)
    assert "".join(pieces(BYTES, ids, skip)) == BYTES.decode(ids, skip)


@given(data=st.text(max_size=40), cut=st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_valid_text_is_shown_a_character_at_a_time(data: str, cut: int) -> None:
    detokenizer = IncrementalDetokenizer(BYTES, True)
    shown = ""
    for count, byte in enumerate(data.encode(), 1):
        shown += detokenizer.push([byte])
        assert shown == data.encode()[:count].decode("utf-8", "ignore")
    assert detokenizer.finish() == ""


@given(seed=st.integers(0, 2**32), text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_qwen3_pieces_join_to_the_whole(qwen3: Tokenizer, seed: int, text: str) -> None:
    rng = random.Random(seed)
    ids = qwen3.encode(text) + [rng.randrange(151_936) for _ in range(20)] + [rng.randrange(256) for _ in range(20)]
    assert "".join(pieces(qwen3, ids)) == qwen3._backend.decode(ids, skip_special_tokens=True)


# --- stop strings ---


def run(ids: Sequence[int], **fields: Any) -> tuple[str, str | None, list[str], int]:
    """Text, stop string, deltas and number of tokens pushed of an answer that is forced to `ids`."""
    output = OutputText(BYTES, SamplingParams(**{"max_tokens": None, **fields}))
    deltas: list[str] = []
    found = None
    for token_id in ids:
        found = output.push(token_id)
        deltas.append(output.take_delta())
        if found is not None:
            break
    output.finish()
    deltas.append(output.take_delta())
    assert "".join(deltas) == output.text
    return output.text, found, deltas, len(deltas) - 1


P03 = [
    ("The quick brown fox jumps", ["own fox"], "The quick br", "own fox"),
    ("The quick brown fox jumps", ["own foxes"], "The quick brown fox jumps", None),
    ("The quick brown fox", ["own foxes"], "The quick brown fox", None),
    ("aaab", ["aab", "ab"], "a", "aab"),
    ("aaab", ["ab", "aab"], "a", "aab"),
    ("hello", ["he"], "", "he"),
    ("hello", ["h"], "", "h"),
    ("hello", ["lo"], "hel", "lo"),
    ("so 🙂 happy", ["🙂"], "so ", "🙂"),
    ("so 🙂🙃 happy", ["🙂🙃 h", "x"], "so ", "🙂🙃 h"),
    ("xabcd", ["abcd", "bc"], "xa", "bc"),
    ("abababac", ["ababac"], "ab", "ababac"),
    ("a <think>b</think>", ["</think>"], "a <think>b", "</think>"),
    ("none of them", [f"stop {i}" for i in range(1000)], "none of them", None),
    ("up to stop 77!", [f"stop {i}!" for i in range(1000)], "up to ", "stop 77!"),
]


@pytest.mark.parametrize(("text", "stop", "shown", "found"), P03)
def test_stop_strings_by_hand(text: str, stop: list[str], shown: str, found: str | None) -> None:
    ids = BYTES.encode(text)
    assert run(ids, stop=stop)[:2] == (shown, found)
    kept = run(ids, stop=stop, include_stop_str_in_output=True)
    assert kept[:2] == (shown + (found or ""), found)


def test_what_follows_the_stop_string_in_its_token_is_dropped() -> None:
    tokenizer = Tokenizer(byte_backend([("a", "b"), ("ab", "c"), ("abc", "d")]), CONFIG)
    (token,) = tokenizer.encode("abcd")
    for include, text in ((False, "a"), (True, "abc")):
        params = SamplingParams(stop="bc", include_stop_str_in_output=include)
        output = OutputText(tokenizer, params)
        assert output.push(token) == "bc"
        output.finish()
        assert (output.text, output.take_delta(), output.take_delta()) == (text, text, "")


def naive(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


SHORT = st.text(alphabet="ab🙂", min_size=1, max_size=4)


@given(text=st.text(alphabet="ab🙂", max_size=30), stops=st.lists(SHORT, min_size=1, max_size=6))
@settings(max_examples=400, deadline=None)
def test_stop_strings_equal_a_naive_search(text: str, stops: list[str]) -> None:
    shown, found, deltas, _ = run(list(text.encode()), stop=stops)
    assert (shown, found) == naive(text, stops)
    for count in range(len(deltas)):
        seen = "".join(deltas[: count + 1])
        assert shown.startswith(seen), "text that was shown was taken back"


@given(text=st.text(alphabet="ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1))
@settings(max_examples=200, deadline=None)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    output = OutputText(BYTES, SamplingParams(stop=stops))
    for count, byte in enumerate(text.encode(), 1):
        if output.push(byte) is not None:
            return
        held = text[len(output.text) : count]
        assert output.text + held == text[:count]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_completed_within_min_tokens_does_not_count() -> None:
    assert run(list(b"xxxxx"), stop="x", min_tokens=3)[::3] == ("xxx", 4)
    assert run(list(b"abab"), stop="ab", min_tokens=2)[::3] == ("ab", 4)
    assert run(list(b"abc"), stop="ab", min_tokens=2)[:2] == ("abc", None)
    assert run(list(b"abc"), stop="bc", min_tokens=2)[:2] == ("a", "bc")


def test_special_tokens_complete_no_stop_string_unless_shown() -> None:
    ids = [65, 257, 66]
    assert run(ids, stop="<|im_end|>")[:2] == ("AB", None)
    assert run(ids, stop="<|im_end|>", skip_special_tokens=False)[:2] == ("A", "<|im_end|>")


def test_an_answer_cut_in_mid_character_ends_in_one_replacement_character() -> None:
    text, found, deltas, _ = run(list("ab👋".encode()[:-1]), stop="zz")
    assert (text, found, deltas) == ("ab\ufffd", None, ["a", "b", "", "", "", "\ufffd"])


def test_finish_can_be_called_again() -> None:
    output = OutputText(BYTES, SamplingParams(stop="zz"))
    output.push(ord("z"))
    assert output.text == ""
    output.finish()
    output.finish()
    assert output.text == "z"


def test_1000_long_stop_strings_cost_no_more_than_one() -> None:
    text = list(b"aab" * 3000)

    def seconds(stops: list[str]) -> float:
        run(text[:3], stop=stops)
        start = time.process_time()
        assert run(text, stop=stops)[1] is None
        return time.process_time() - start

    many = ["aab" * 10 + f"{i:030d}" for i in range(1000)]
    assert seconds(many) < 10 * seconds(["aab" * 10 + "c"]) + 0.05


def test_text_grows_in_linear_time() -> None:
    output = OutputText(BYTES, SamplingParams(stop="never this"))
    start = time.process_time()
    for _ in range(100_000):
        output.push(ord("n"))
    assert time.process_time() - start < 2
    assert re.fullmatch("n{99999}", output.text)
