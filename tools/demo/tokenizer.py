"""Builds the demo checkpoint's byte-level BPE tokenizer and chat template."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from demo.tasks import TASKS, train_example
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 768
MAX_LENGTH = 2048
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
# Like Qwen3's, these are no special tokens: they stay visible when special tokens are skipped.
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
# A space is a piece of its own, so a word has the same tokens wherever it stands in a phrase.
# JSON punctuation may span one space, which shortens tool schemas.
PIECES = r"""\p{N}|\p{L}+|\n+|["{}\[\]:,]+(?: ["{\[]+)?|[^\s\p{L}\p{N}]+|\s"""

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def _corpus(seed: int) -> Iterator[str]:
    """Texts of training-split examples, so that merges cover the formats and common words."""
    rng = random.Random(seed)
    for _ in range(3000):
        for task in TASKS:
            example = train_example(task, rng)
            for message in example.messages:
                yield f"{message['role']}\n{message['content']}"
            for tool in example.tools or []:
                yield f"system\n# Tools\n\n{json.dumps(tool)}"
            yield f"assistant\n{example.answer}\n\n"


def train_bpe(seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens, the added tokens last as in Qwen3's."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP_TOKENS])
    return tokenizer


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """The transformers tokenizer around `train_bpe`'s, with the chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(seed),
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return cast(PreTrainedTokenizerFast, tokenizer)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with the fields of Qwen3's own."""
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
    added = {
        str(index): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for index, token in sorted(tokenizer.added_tokens_decoder.items())
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": MAX_LENGTH,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
