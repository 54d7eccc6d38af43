"""Text to token ids and token ids to bytes, for tokenizers whose tokens are byte sequences.

These are byte-level BPE (Qwen, Llama 3, SmolLM2) and BPE with one token for each byte to fall back on (Llama 2, TinyLlama).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers

from qwenrt.plugins import ConfigError, RequestError

MAX_FILE_BYTES = 128 << 20
"""Largest tokenizer.json that is read."""
MAX_CONFIG_BYTES = 8 << 20
"""Largest tokenizer_config.json that is read."""
MAX_VOCAB = 1 << 24
MAX_TEXT_CHARS = 1 << 22
"""Longest text that is encoded, whatever the context length."""
_NFC_SHRINKS = 4
"""A normalised text is at least this fraction as long as it was (U+0390 has the longest canonical decomposition but three)."""
_SPECIAL_FIELDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 characters are their own bytes, U+0100 on the others in order."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
_BYTE_FALLBACK = (
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
)
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def _byte_fallback(token: str) -> bytes:
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode("utf-8")


def _spelling(decoder: Any) -> tuple[Callable[[str], bytes], bool]:
    """What a token's bytes are, by the decoder of tokenizer.json, and whether a text's first space is left out."""
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    if state.get("type") == "ByteLevel":
        return _byte_level, False
    steps = state.get("decoders", [])
    strips = steps[-1:] == [_STRIP]
    if (steps[:-1] if strips else steps) == list(_BYTE_FALLBACK):
        return _byte_fallback, strips
    raise ConfigError(
        f"tokenizer.json: decoder is {state.get('type')}; supported are ByteLevel and the byte fallback of Llama, use a "
        "checkpoint with a byte-level BPE tokenizer (Qwen, Llama 3, SmolLM2) or one of Llama 2 and TinyLlama"
    )


class Tokenizer:
    """A checkpoint's tokenizer. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        """`backend` as the tokenizers library reads tokenizer.json, `config` the contents of tokenizer_config.json."""
        self._spell, self._strips_first_space = _spelling(backend.decoder)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self._backend = backend
        self._ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(self._ids.values(), default=-1)
        """One more than the largest token id; the model's vocabulary may be larger (padding)."""
        if not 0 < self.vocab_size <= MAX_VOCAB:
            raise ConfigError(
                f"tokenizer.json: the largest token id is {self.vocab_size - 1}; it must be 0 to {MAX_VOCAB - 1}"
            )
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._max_token_chars = max(map(len, self._ids))
        added = backend.get_added_tokens_decoder()
        self.special_tokens = special_tokens(config)
        """The configured special tokens by field name (eos_token, pad_token, ...)."""
        named = [*self.special_tokens.values(), *_texts(config.get("additional_special_tokens") or ())]
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special) | {
            self._named(t) for t in named
        }
        """Tokens that `skip_special_tokens` leaves out. Qwen3's <think> and <tool_call> are not among them."""
        self._check_added(config.get("added_tokens_decoder") or {})
        eos = self.special_tokens.get("eos_token")
        self.eos_token_id = None if eos is None else self._named(eos)

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read tokenizer.json and tokenizer_config.json of a folder; raises ConfigError naming the file that is wrong."""
        folder = Path(path)
        text = read_text(folder / "tokenizer.json", MAX_FILE_BYTES)
        if text is None:
            raise ConfigError(f"{folder} has no tokenizer.json; save one with transformers' save_pretrained")
        return cls(_backend_of(text, folder / "tokenizer.json"), read_config(folder))

    def encode(self, text: str, *, max_tokens: int | None = None, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids, as in transformers. Nothing is cut.

        add_special_tokens: put before and after it what the tokenizer has for that, such as Llama's <s>; Qwen's has nothing. A
        rendered chat template has them written out already.

        Raises RequestError if the text is no valid Unicode, or has more than 4,194,304 characters, or so many that it cannot be
        `max_tokens` tokens (the exact number is for the caller to check).
        """
        if not isinstance(text, str):
            raise RequestError(f"text is a {type(text).__name__}; it must be a string")
        most = MAX_TEXT_CHARS
        if max_tokens is not None:
            most = min(most, max_tokens * self._max_token_chars * _NFC_SHRINKS)
        if len(text) > most:
            raise RequestError(f"the text has {len(text)} characters; at most {most} are encoded here, shorten it")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            surrogate = ord(text[error.start])
            raise RequestError(
                f"the text has the lone surrogate U+{surrogate:04X} at character {error.start}; it must be valid Unicode"
            ) from None
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            _raise_unless_of_library(error)
            raise RequestError(f"the tokenizer cannot encode this text ({str(error)[:200]})") from None
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens; bytes that are no UTF-8 become U+FFFD, ids without a token nothing. As in transformers."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, not always whole characters; empty for an id without a token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._spell(self._backend.id_to_token(token_id) or "")
            self._bytes[token_id] = known
        return known

    def token_id(self, token: str) -> int | None:
        """Id of the token that is written so, None if there is none."""
        return self._ids.get(token)

    def _check_added(self, added: Any) -> None:
        if not isinstance(added, dict):
            raise ConfigError(
                "tokenizer_config.json: added_tokens_decoder must be an object; copy it again from the checkpoint"
            )
        for token_id, token in zip(added, _texts(added.values()), strict=True):
            if str(self._ids.get(token)) != token_id:
                raise ConfigError(
                    f"tokenizer_config.json gives the token {token[:40]!r} the id {token_id[:20]}, tokenizer.json "
                    f"{self._ids.get(token)}; copy both from one checkpoint"
                )

    def _named(self, token: str) -> int:
        token_id = self._ids.get(token)
        if token_id is None:
            raise ConfigError(
                f"tokenizer_config.json names the token {token[:40]!r}, which tokenizer.json lacks; copy both from one checkpoint"
            )
        return token_id


def read_text(path: Path, max_bytes: int) -> str | None:
    """Contents of a text file, None if there is none; raises ConfigError if it is too large or no UTF-8."""
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > max_bytes:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes; at most {max_bytes} are read")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8; copy it again from the checkpoint") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Contents of a folder's tokenizer_config.json, empty if there is none; raises ConfigError if it is no JSON object."""
    path = folder / "tokenizer_config.json"
    text = read_text(path, MAX_CONFIG_BYTES)
    try:
        config = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); copy it again from the checkpoint") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object; copy it again from the checkpoint")
    return config


def _backend_of(text: str, path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        _raise_unless_of_library(error)
        raise ConfigError(f"{path} is no tokenizer ({str(error)[:200]}); copy it again from the checkpoint") from None


def _raise_unless_of_library(error: BaseException) -> None:
    """The library's panics derive from BaseException alone, as KeyboardInterrupt does."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer_config.json names, by field; raises ConfigError if one is no text."""
    named = {field: config[field] for field in _SPECIAL_FIELDS if config.get(field) is not None}
    return dict(zip(named, _texts(named.values()), strict=True))


def _texts(tokens: Iterable[Any]) -> list[str]:
    """Tokens as text; the config has each as a string or as an object with `content`."""
    texts = []
    for token in tokens:
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise ConfigError(f"tokenizer_config.json: a special token is {str(text)[:40]!r}; it must be a string")
        texts.append(text)
    return texts
