"""Tokens of text and text of tokens, and tokenizer files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenrt.plugins import ConfigError, RequestError
from qwenrt.runtime.text import tokenizer as module
from qwenrt.runtime.text.detokenizer import IncrementalDetokenizer
from qwenrt.runtime.text.tokenizer import Tokenizer

from .conftest import CONFIG, LLAMA_CONFIG, SHOWN, SPECIAL, byte_backend, llama_backend

TEXTS = [
    "",
    "a",
    "Swift 社区",
    "삼겹살",
    "👋🏽",
    "👨‍👩‍👧",
    "e\u0301",
    "\ufffd",
    "\0\x7f",
    "a <think>b</think> <|im_end|>\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokens_round_trip(byte_tokenizer: Tokenizer, text: str) -> None:
    assert byte_tokenizer.decode(byte_tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_skipped_and_added_ones_are_not(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("<|im_start|><think>x</think><tool_call><|im_end|>")
    assert len(ids) == 6
    assert byte_tokenizer.decode(ids) == "<think>x</think><tool_call>"
    assert byte_tokenizer.eos_token_id == byte_tokenizer.token_id("<|im_end|>") == 257
    assert byte_tokenizer.special_token_ids == {256, 257, 258}
    assert byte_tokenizer.vocab_size == 256 + len(SPECIAL) + len(SHOWN)
    assert byte_tokenizer.token_id("<nothing>") is None


def test_ids_without_a_token_decode_to_nothing(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.decode([65, 9999, -1, 66]) == "AB"
    assert byte_tokenizer.token_bytes(9999) == byte_tokenizer.token_bytes(-1) == b""


@given(ids=st.lists(st.integers(0, 262), max_size=60), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_decode_equals_the_librarys_own(ids: list[int], skip: bool) -> None:
    assert BYTES.decode(ids, skip) == BACKEND.decode(ids, skip_special_tokens=skip)


BACKEND = byte_backend()
BYTES = Tokenizer(byte_backend(), CONFIG)


def test_added_tokens_whose_text_is_outside_the_byte_alphabet_decode_as_written() -> None:
    backend = byte_backend()
    backend.add_tokens(["<a b>", "社区", "é!"])
    ids = backend.encode("x<a b>社区é!").ids
    assert Tokenizer(backend, CONFIG).decode(ids) == backend.decode(ids)


def test_truncation_and_padding_in_the_file_are_ignored() -> None:
    backend = byte_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=300)
    assert len(Tokenizer(backend, CONFIG).encode("x" * 100)) == 100


@pytest.mark.parametrize("text", ["a\ud800", "\udfff", "\ud83d\ude00"])
def test_lone_surrogates_are_refused(byte_tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="lone surrogate U\\+D"):
        byte_tokenizer.encode(text)


@pytest.mark.parametrize("text", [None, b"bytes", 5, ["a"]])
def test_what_is_no_text_is_refused(byte_tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match="must be a string"):
        byte_tokenizer.encode(text)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="4194305 characters; at most 4194304"):
        byte_tokenizer.encode("a" * (2**22 + 1))
    longest = len("<|endoftext|>")
    with pytest.raises(RequestError, match=f"at most {10 * longest * 4}"):
        byte_tokenizer.encode("a" * (10 * longest * 4 + 1), max_tokens=10)
    assert len(byte_tokenizer.encode("<|endoftext|>" * 10, max_tokens=10)) == 10


def test_an_error_of_the_library_is_a_request_error() -> None:
    backend = byte_backend()
    backend.model = tokenizers.models.WordLevel({"a": 0, "<|im_end|>": 257, "<|endoftext|>": 258}, unk_token="missing")
    with pytest.raises(RequestError, match="cannot encode"):
        Tokenizer(backend, CONFIG).encode("b")


def write(folder: Path, tokenizer: str | bytes | None, config: Any = CONFIG) -> Path:
    if isinstance(tokenizer, str):
        tokenizer = tokenizer.encode()
    if tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_a_folder_is_read_with_and_without_the_config(tmp_path: Path) -> None:
    text = byte_backend().to_str()
    assert Tokenizer.from_dir(write(tmp_path, text)).eos_token_id == 257
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.from_dir(tmp_path).eos_token_id is None


def test_special_tokens_of_the_config_count_as_special(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "<think>"}, "additional_special_tokens": ["</think>"], "bos_token": None}
    read = Tokenizer.from_dir(write(tmp_path, byte_backend().to_str(), config))
    assert read.decode(read.encode("<think>x</think>")) == "x"
    assert read.special_tokens == {"eos_token": "<think>"}


GARBAGE = {
    "empty": "",
    "not json": "nonsense",
    "a list": "[]",
    "no model": "{}",
    "deep": "[" * 100_000,
    "deep objects": '{"model":' * 100_000,
    "binary": b"\xff\xfe\x00",
    "no decoder": '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[]}}',
    "huge id": '{"version":"1.0","decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,'
    '"use_regex":true},"model":{"type":"BPE","vocab":{"a":4294967295},"merges":[]}}',
    "no vocabulary": '{"version":"1.0","decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,'
    '"use_regex":true},"model":{"type":"BPE","vocab":{},"merges":[]}}',
    "merge of nothing": '{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[["a","b"]]}}',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_garbage_tokenizer_is_a_config_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        Tokenizer.from_dir(write(tmp_path, GARBAGE[name]))


@pytest.mark.parametrize(
    "config",
    [
        "",
        "[]",
        "nonsense",
        "[" * 100_000,
        '{"eos_token": 5}',
        '{"eos_token": "<nothing>"}',
        '{"pad_token": {}}',
        '{"added_tokens_decoder": 5}',
        '{"added_tokens_decoder": {"999": {"content": "<think>"}}}',
        '{"added_tokens_decoder": {"263": {"content": "<more>"}}}',
        '{"added_tokens_decoder": {"x": {"content": 1}}}',
    ],
)
def test_a_garbage_config_is_a_config_error(tmp_path: Path, config: str) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(write(tmp_path, byte_backend().to_str(), config))


def test_a_missing_or_oversized_tokenizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 10)
    with pytest.raises(ConfigError, match="at most 10 are read"):
        Tokenizer.from_dir(write(tmp_path, "x" * 11))


@pytest.mark.parametrize(
    "decoder", [tokenizers.decoders.Metaspace(), tokenizers.decoders.WordPiece(), tokenizers.decoders.ByteFallback()]
)
def test_another_kind_of_tokenizer_is_refused_by_name(decoder: Any) -> None:
    backend = byte_backend()
    backend.decoder = decoder
    with pytest.raises(ConfigError, match=f"decoder is {type(decoder).__name__}"):
        Tokenizer(backend, CONFIG)


LLAMA = Tokenizer(llama_backend(), LLAMA_CONFIG)


@pytest.mark.parametrize("text", [*TEXTS, "ab cd", "  ab  ", "<s>ab</s> cd", "▁"])
@pytest.mark.parametrize("skip", [True, False])
def test_llama_decode_equals_the_librarys_own(text: str, skip: bool) -> None:
    ids = LLAMA.encode(text)
    assert LLAMA.decode(ids, skip) == llama_backend().decode(ids, skip_special_tokens=skip)


def test_llama_begins_a_text_that_is_no_rendered_template() -> None:
    assert LLAMA.encode("ab") == [1, *LLAMA.encode("ab", add_special_tokens=False)]
    assert LLAMA.encode("<s>ab", add_special_tokens=False)[:2] == [1, LLAMA.token_id("▁ab")]


def test_llama_text_that_goes_on_keeps_its_first_space() -> None:
    ids = LLAMA.encode("ab 社", add_special_tokens=False)
    text = IncrementalDetokenizer(LLAMA, skip_special_tokens=True)
    assert "".join([*(text.push([token]) for token in ids), text.finish()]) == " ab 社"
    assert LLAMA.decode(ids) == "ab 社"


def test_qwen3_facts(qwen3: Tokenizer) -> None:
    assert (qwen3.vocab_size, qwen3.eos_token_id) == (151_669, 151_645)
    assert qwen3.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    ids = qwen3.encode("<|im_start|>a<think>e\u0301</think><|im_end|>")
    assert ids[0] == 151_644
    assert qwen3.decode(ids) == "a<think>\u00e9</think>"


@given(seed=st.integers(0, 2**32), skip=st.booleans(), text=st.text(max_size=50))
@settings(max_examples=150, deadline=None)
def test_qwen3_decode_equals_the_librarys_own(qwen3: Tokenizer, seed: int, skip: bool, text: str) -> None:
    import random

    rng = random.Random(seed)
    ids = [rng.choice([rng.randrange(151_936), rng.randrange(256), rng.randrange(151_643, 151_669)]) for _ in range(60)]
    ids += qwen3.encode(text)
    assert qwen3.decode(ids, skip) == qwen3._backend.decode(ids, skip_special_tokens=skip)


def test_every_qwen3_token_has_the_librarys_bytes(qwen3: Tokenizer) -> None:
    for token_id in range(0, qwen3.vocab_size, 7):
        text = qwen3._backend.decode([token_id], skip_special_tokens=False)
        assert qwen3.token_bytes(token_id).decode("utf-8", "replace") == text
