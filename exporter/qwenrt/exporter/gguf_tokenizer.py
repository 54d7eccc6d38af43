"""A GGUF file's tokenizer as the files that Hugging Face's libraries have it in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qwenrt.plugins import ConfigError

from .json_fields import shown

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers cut text before they merge bytes: what llama.cpp means by the names in `_PRE`."""
_PRE = ("qwen2", "deepseek-r1-qwen")
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_END_OF_TEXT = ("<|im_end|>", "<|endoftext|>")
"""Tokens that end a text wherever they are, as in llama.cpp: a file names only one."""


def tokenizer_files(metadata: Mapping[str, Any], source: str) -> dict[str, str]:
    """Contents of tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja.

    Raises ConfigError unless it is a byte-level BPE that cuts text as Qwen's does.
    """

    def value(name: str, kind: type) -> Any:
        found = metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(found, kind):
            raise ConfigError(
                f"{source}: tokenizer.ggml.{name} is missing or no {kind.__name__}; convert the model again"
            )
        return found

    for name, allowed in (("model", ("gpt2",)), ("pre", _PRE)):
        if value(name, str) not in allowed:
            raise ConfigError(
                f"{source}: tokenizer.ggml.{name} is {shown(value(name, str))}, supported is {' or '.join(allowed)}, Qwen's "
                "byte-level BPE"
            )
    if metadata.get("tokenizer.ggml.add_bos_token") is True:
        raise ConfigError(f"{source}: tokenizer.ggml.add_bos_token is true, which Qwen's tokenizers do not know")
    tokens, merges = value("tokens", list), metadata.get("tokenizer.ggml.merges", [])
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [1] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ConfigError(
            f"{source}: tokenizer.ggml.tokens has a token twice, or not as many as token_type; download it again"
        )
    kinds = list(enumerate(zip(tokens, types, strict=True)))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": token, **flags, "special": kind == _CONTROL}
        for number, (token, kind) in kinds
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _PATTERN}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {
                token: number for number, (token, kind) in kinds if kind not in (_CONTROL, _USER_DEFINED, _UNUSED)
            },
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    names = {"eos_token": "eos", "bos_token": "bos", "pad_token": "padding"}
    config: dict[str, Any] = {"tokenizer_class": "Qwen2Tokenizer", "clean_up_tokenization_spaces": False}
    config |= {field: _token(metadata, tokens, f"{name}_token_id", source) for field, name in names.items()}
    files = {"tokenizer.json": json.dumps(tokenizer, ensure_ascii=False), "tokenizer_config.json": json.dumps(config)}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        files["chat_template.jinja"] = template
    return files


def end_of_text_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens that end a text: those that the file names, and Qwen's own where they are control tokens."""
    found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    kinds = zip(metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ()), strict=False)
    found += [number for number, (token, kind) in enumerate(kinds) if kind == _CONTROL and token in _END_OF_TEXT]
    return list(dict.fromkeys(number for number in found if number is not None))


def _token(metadata: Mapping[str, Any], tokens: list[str], name: str, source: str) -> str | None:
    number = metadata.get(f"tokenizer.ggml.{name}")
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise ConfigError(f"{source}: tokenizer.ggml.{name} is {shown(number)}, must be below {len(tokens)}")
    return tokens[number]
