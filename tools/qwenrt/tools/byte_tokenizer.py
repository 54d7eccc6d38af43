"""The smallest tokenizer that speaks Qwen's dialect: 256 byte tokens, Qwen3's special tokens, a ChatML template."""

from __future__ import annotations

import json
from typing import Any

from qwenrt.plugins import ConfigError

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Qwen3's added tokens in the order of their ids."""

_NUM_VISIBLE = 14
"""The first tokens of the list are special (dropped by skip_special_tokens); those from <tool_call> on are ordinary text."""

_QWEN3_FIRST_SPECIAL = 151643

CHAT_TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n\nYou may call these functions, given as JSON inside <tools></tools>:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\n\nAnswer a call as {"name": ..., "arguments": ...} inside <tool_call></tool_call>.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = (message.content or '').split('</think>')[-1].lstrip('\n') %}
        {{- '<|im_start|>assistant\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\n<tool_call>\n' + ({'name': call.name, 'arguments': call.arguments} | tojson) + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""".lstrip()


def special_ids(vocab_size: int) -> dict[str, int]:
    """Id of each special token: Qwen3's own ids where the vocabulary is large enough, else the last ones of the vocabulary."""
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size is {vocab_size}, a byte-level tokenizer with Qwen's special tokens needs {smallest}"
        )
    first = min(_QWEN3_FIRST_SPECIAL, vocab_size - len(SPECIAL_TOKENS))
    return {token: first + i for i, token in enumerate(SPECIAL_TOKENS)}


def tokenizer_files(vocab_size: int) -> dict[str, str]:
    """Contents of tokenizer.json, tokenizer_config.json and chat_template.jinja, by file name.

    Text becomes one token a byte (ids 0 to 255 are the bytes). The ids between the bytes and the special tokens are never
    encoded to; each decodes to a space and its own number, so that what a random model says can be read.
    """
    ids = special_ids(vocab_size)
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    vocab |= {f"Ġ{i}": i for i in range(256, ids[SPECIAL_TOKENS[0]])} | ids
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = [
        {"id": ids[token], "content": token, **flags, "special": i < _NUM_VISIBLE}
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
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
            "vocab": vocab,
            "merges": [],
        },
    }
    config = {
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added},
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
    }


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where it is printable, else the next unused code point from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]
