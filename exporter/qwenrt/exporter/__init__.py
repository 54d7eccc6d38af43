"""The exporter: checkpoint in, engine folder out."""

from .checkpoint import Checkpoint, open_checkpoint
from .config import ModelConfig
from .export import export
from .tensorrt.plans import build_plans

__all__ = ["Checkpoint", "ModelConfig", "build_plans", "export", "open_checkpoint"]
