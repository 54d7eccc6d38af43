"""From text to text: the runtime around an engine folder."""

from qwenrt.plugins import ConfigError, DeviceError, QwenrtError, RequestError

from .adapters import LoRARequest
from .engine import LLMEngine
from .engine_dir import EngineDir, EngineManifest
from .llm import LLM
from .outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    RequestOutput,
    ScoreOutput,
    TokenLogprobs,
)
from .sampling.params import SamplingParams
from .sampling.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "ClassificationOutput",
    "CompletionOutput",
    "ConfigError",
    "DeviceError",
    "EmbeddingOutput",
    "EngineDir",
    "EngineManifest",
    "LLMEngine",
    "LoRARequest",
    "QwenrtError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "TokenLogprobs",
]
