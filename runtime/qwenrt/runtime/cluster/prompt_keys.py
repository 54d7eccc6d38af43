"""What routing wants to know of a request: the hash of its prompt's first blocks, and about how many tokens it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from qwenrt.plugins import QwenrtError, RequestError

from ..engine_dir import EngineDir
from ..routing import PREFIX_BLOCKS, prefix_key
from ..server.chat import prompt_text, template_arguments
from ..server.chat_protocol import ChatCompletionRequest, ChatMessage
from ..server.protocol import CompletionRequest
from ..server.responses import ResponsesRequest, as_chat
from ..server.sampling import answer_form
from ..server.tool_choice import tool_use
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .ticket import Ticket

_BYTES_PER_TOKEN = 4
"""Of a body, on average."""
_CHARS_PER_TOKEN = 16
"""Of a prompt's first tokens, at most; the rest is not tokenized here."""
_DEFAULT_ANSWER = 256
"""Tokens, where a request sets no limit."""
_MAX_WAITING = 64
"""Requests that may wait for their key; one more goes without."""


class PromptKeys:
    """Makes tickets with the tokenizer and chat template of an engine folder; raises ConfigError if it has no valid ones."""

    def __init__(self, engine: EngineDir) -> None:
        self._tokenizer = Tokenizer.from_dir(engine.path)
        self._template = ChatTemplate.from_dir(engine.path)
        self._vocab_size = engine.manifest.model.vocab_size
        self._block_size = engine.manifest.block_size
        self._max_chars = PREFIX_BLOCKS * self._block_size * _CHARS_PER_TOKEN
        self._readers: dict[str, Callable[[bytes], tuple[list[int], int]]] = {
            "/v1/chat/completions": lambda body: self._chat(ChatCompletionRequest.model_validate_json(body)),
            "/v1/responses": lambda body: self._chat(as_chat(ResponsesRequest.model_validate_json(body))),
            "/v1/completions": lambda body: self._completion(CompletionRequest.model_validate_json(body)),
        }
        self._thread = ThreadPoolExecutor(1, "prompt-keys")
        self._waiting = 0

    async def ticket(self, path: str, body: bytes) -> Ticket:
        """The ticket of a request; one that is wrong gets one too, and whichever replica says what is wrong."""
        size = len(body) // _BYTES_PER_TOKEN
        if path not in self._readers or self._waiting >= _MAX_WAITING:
            return Ticket(None, size)
        self._waiting += 1
        try:
            key, answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._read, path, body)
        finally:
            self._waiting -= 1
        return Ticket(key, size + answer)

    def close(self) -> None:
        """End the thread, and the process that renders."""
        self._thread.shutdown(wait=False)
        if self._template is not None:
            self._template.close()

    def _read(self, path: str, body: bytes) -> tuple[bytes | None, int]:
        try:
            token_ids, answer = self._readers[path](body)
        except (ValidationError, QwenrtError):
            return None, 0
        return prefix_key(token_ids, self._block_size), answer

    def _chat(self, body: ChatCompletionRequest) -> tuple[list[int], int]:
        """First tokens of the prompt, and tokens of the answer at most."""
        use = tool_use(body, answer_form(body))
        text = prompt_text(self._template, _first_turn(body.messages), use.shown, template_arguments(body))
        answer = body.max_completion_tokens or body.max_tokens or _DEFAULT_ANSWER
        return self._tokenizer.encode(text[: self._max_chars], add_special_tokens=False), answer * (body.n or 1)

    def _completion(self, body: CompletionRequest) -> tuple[list[int], int]:
        first = body.prompts[0] if body.prompts else []
        if isinstance(first, str):
            first = self._tokenizer.encode(first[: self._max_chars])
        elif not all(0 <= token < self._vocab_size for token in first):
            raise RequestError("the prompt has a token that is none")
        return first, (body.max_tokens or _DEFAULT_ANSWER) * (body.n or 1) * len(body.prompts)


def _first_turn(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The messages up to the first of the user: they begin every turn of the conversation, and are the same in each."""
    for index, message in enumerate(messages):
        if message.role == "user":
            return messages[: index + 1]
    return messages
