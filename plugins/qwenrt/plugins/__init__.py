"""The custom ops: one definition (`schema`), a judge (`reference`), and the compiled implementations (`library`)."""

from .errors import ConfigError, QwenrtError, RequestError

__all__ = ["ConfigError", "QwenrtError", "RequestError"]
