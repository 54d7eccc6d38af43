"""The exporter: checkpoint in, engine folder out."""

from .checkpoint import Checkpoint, open_checkpoint
from .config import ModelConfig
from .export import export

__all__ = ["Checkpoint", "ModelConfig", "export", "open_checkpoint"]
