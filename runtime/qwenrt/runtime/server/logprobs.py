"""Log-probabilities in the two shapes that OpenAI gives them."""

from __future__ import annotations

from collections.abc import Sequence

from ..outputs import TokenLogprobs
from ..text.tokenizer import Tokenizer
from .protocol import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob


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
            text = self._text(token.token_id)
            written.tokens.append(text)
            written.token_logprobs.append(token.logprob)
            written.top_logprobs.append({self._text(top): logprob for top, logprob in token.top.items()})
            written.text_offset.append(self._offset)
            self._offset += len(text)
        return written

    def _text(self, token_id: int) -> str:
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
