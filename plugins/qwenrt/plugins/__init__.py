"""The custom ops: one definition (`schema`), a judge (`reference`), and the compiled implementations (`library`)."""

from .errors import ConfigError, DeviceError, QwenrtError, QwenrtWarning, RequestError

__all__ = ["ConfigError", "DeviceError", "QwenrtError", "QwenrtWarning", "RequestError"]
