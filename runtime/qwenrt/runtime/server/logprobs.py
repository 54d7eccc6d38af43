"""Log-probabilities in the two shapes that OpenAI gives them."""

from __future__ import annotations

from collections.abc import Sequence

from ..outputs import TokenLogprobs
from ..text.tokenizer import Tokenizer
from .chat_protocol import ChatLogprobs, TokenLogprob, TopLogprob
from .protocol import CompletionLogprobs


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
    """For chats: a token as text (U+FFFD for what is no character) and as bytes."""
    if tokens is None:
        return None

    def fields(token_id: int, logprob: float) -> dict[str, object]:
        spelled = tokenizer.token_bytes(token_id)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(spelled)}

    return ChatLogprobs(
        content=[
            TokenLogprob.model_validate(
                {
                    **fields(token.token_id, token.logprob),
                    "top_logprobs": [TopLogprob.model_validate(fields(*top)) for top in token.top.items()],
                }
            )
            for token in tokens
        ]
    )


class CompletionLogprobsWriter:
    """For completions, piece by piece: tokens as texts (`bytes:\\xe7` for what is no text), and where they begin."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def write(self, tokens: Sequence[TokenLogprobs] | None) -> CompletionLogprobs | None:
        """Those of the next tokens."""
        if tokens is None:
            return None
        written = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in tokens:
            top = {self._text(top): logprob for top, logprob in token.top.items()}
            self._write(written, token.token_id, token.logprob, top)
        return written

    def write_prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], later: Sequence[TokenLogprobs] | None
    ) -> CompletionLogprobs:
        """Those of a prompt, of whose first token there is none, and of the first tokens after it."""
        written = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        self._write(written, token_ids[0], None, None)
        return joined(joined(written, self.write(logprobs)), self.write(later))

    def _write(
        self, written: CompletionLogprobs, token_id: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        text = self._text(token_id)
        written.tokens.append(text)
        written.token_logprobs.append(logprob)
        written.top_logprobs.append(top)
        written.text_offset.append(self._offset)
        self._offset += len(text)

    def _text(self, token_id: int) -> str:
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def joined(first: CompletionLogprobs, later: CompletionLogprobs | None) -> CompletionLogprobs:
    """Both as one; the first is extended."""
    if later is not None:
        first.tokens += later.tokens
        first.token_logprobs += later.token_logprobs
        first.top_logprobs += later.top_logprobs
        first.text_offset += later.text_offset
    return first
