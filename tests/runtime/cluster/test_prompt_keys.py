"""What requests are routed by: the hash of the blocks that the engine itself would look up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwenrt.runtime import LLM
from qwenrt.runtime.cluster.prompt_keys import PromptKeys
from qwenrt.runtime.cluster.ticket import Ticket
from qwenrt.runtime.engine_dir import EngineDir
from qwenrt.runtime.routing import prefix_key

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LETTERS = "the quick brown fox jumps over the lazy dog " * 20


@pytest.fixture(scope="module")
def llm(demo_engine: Path) -> LLM:
    return LLM(demo_engine, num_kv_blocks=64)


@pytest.fixture(scope="module")
def keys(demo_engine: Path) -> Iterator[PromptKeys]:
    keys = PromptKeys(EngineDir.open(demo_engine))
    yield keys
    keys.close()


def ticket(keys: PromptKeys, path: str, body: Any) -> Ticket:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(keys.ticket(path, data))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_prompt_has_the_key_of_its_own_first_blocks(keys: PromptKeys, llm: LLM) -> None:
    size = llm.engine.manifest.block_size
    token_ids = llm.engine.tokenizer.encode(LETTERS)
    assert ticket(keys, TEXT, {"prompt": LETTERS}).key == prefix_key(token_ids, size)
    assert ticket(keys, TEXT, {"prompt": token_ids}).key == prefix_key(token_ids, size)
    rendered = llm.engine.tokenizer.encode(llm.render([user(LETTERS)]), add_special_tokens=False)
    assert ticket(keys, CHAT, {"messages": [user(LETTERS)]}).key == prefix_key(rendered, size)


def test_all_turns_of_a_conversation_have_one_key_and_other_conversations_have_others(keys: PromptKeys) -> None:
    opening = [{"role": "system", "content": "Be brief."}, user(LETTERS[:40])]
    later = [*opening, {"role": "assistant", "content": "Yes."}, user("Why?")]
    first = ticket(keys, CHAT, {"messages": opening}).key
    assert first is not None
    assert ticket(keys, CHAT, {"messages": later}).key == first
    assert ticket(keys, CHAT, {"messages": [opening[0], user(LETTERS[9:49])]}).key != first
    with_instructions = {"instructions": "Be brief.", "input": LETTERS[:40]}
    assert ticket(keys, RESPONSES, with_instructions).key == first


def test_a_prompt_that_fills_no_block_has_no_key(keys: PromptKeys) -> None:
    assert ticket(keys, TEXT, {"prompt": "ab"}).key is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b"{"),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [user("x")], "tool_choice": "required"}),
        (CHAT, {"messages": [user("x")], "max_tokens": "many"}),
        (TEXT, {"prompt": []}),
        (TEXT, {"prompt": [1 << 80] * 300}),
        (TEXT, {"prompt": [[-5] * 300]}),
        (TEXT, {"prompt": "\ud800" * 300}),
        (RESPONSES, {"input": [{"type": "message"}]}),
        ("/v1/embeddings", {"input": LETTERS}),
        ("/tokenize", b"\xff"),
    ],
)
def test_what_cannot_be_read_goes_anywhere(keys: PromptKeys, path: str, body: Any) -> None:
    assert ticket(keys, path, body).key is None


def test_tokens_are_those_that_may_be_asked_for(keys: PromptKeys) -> None:
    prompt = len(json.dumps({"prompt": LETTERS})) // 4
    assert ticket(keys, TEXT, {"prompt": LETTERS}).tokens == prompt + 256
    most = {"prompt": LETTERS, "max_tokens": 1000, "n": 2}
    assert ticket(keys, TEXT, most).tokens == len(json.dumps(most)) // 4 + 2000
