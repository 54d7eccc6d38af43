"""Tokenizers for the tests of text: one whose tokens are single bytes, and Qwen3's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from qwenrt.runtime.text.tokenizer import Tokenizer

QWEN3 = Path(__file__).resolve().parents[4] / "shared" / "qwen3-tokenizer"

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
SHOWN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CONFIG = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def byte_backend(merges: list[tuple[str, str]] | None = None) -> tokenizers.Tokenizer:
    """Ids 0 to 255 are the bytes, then the merges, then the special tokens and those that are added but not special."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {byte: chr(byte) for byte in own}
    for byte in range(256):
        chars.setdefault(byte, chr(0x100 + len(chars) - len(own)))
    merges = merges or []
    tokens = [chars[byte] for byte in range(256)] + ["".join(pair) for pair in merges]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in SHOWN])
    return backend


LLAMA_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def llama_backend() -> tokenizers.Tokenizer:
    """As Llama 2 and TinyLlama have it: words begin with U+2581, and what the vocabulary lacks falls back on byte tokens."""
    d, n = tokenizers.decoders, tokenizers.normalizers
    merges = [("▁", "a"), ("▁", "b"), ("▁a", "b"), ("c", "d"), ("▁", "▁")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcd", *map("".join, merges)]
    model = tokenizers.models.BPE(
        {token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁")])
    backend.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_backend(), CONFIG)


@pytest.fixture(scope="session")
def qwen3_dir() -> Path:
    if not QWEN3.is_dir():
        pytest.skip("Qwen3's tokenizer is not beside the repository (shared/qwen3-tokenizer)")
    return QWEN3


@pytest.fixture(scope="session")
def qwen3(qwen3_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(qwen3_dir)
