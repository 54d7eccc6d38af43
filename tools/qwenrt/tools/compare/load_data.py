"""polygraphy's --data-loader-script for engines: valid paged batches, made as `qwenrt compare` makes them.

The engine folder is named by the environment variable QWENRT_ENGINE, since polygraphy calls `load_data` with no arguments.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from qwenrt.plugins import ConfigError
from qwenrt.runtime import EngineDir
from qwenrt.tools.compare.batches import make_batches
from qwenrt.tools.compare.feeds import Feed
from qwenrt.tools.compare.references import executor
from qwenrt.tools.compare.runners.graph import GraphRunner

VARIABLE = "QWENRT_ENGINE"


def load_data() -> Iterator[Feed]:
    """Three steps, the KV pools of each as the step before left them; raises ConfigError if no engine folder is named."""
    path = os.environ.get(VARIABLE)
    if not path:
        raise ConfigError(f"set {VARIABLE} to the engine folder, so that valid paged batches can be made for it")
    engine = EngineDir.open(path)
    name = "onnxruntime" if engine.manifest.target == "onnxruntime" else "torch"
    runner = GraphRunner(name, engine, executor(name, engine))
    with runner:
        for batch in make_batches(engine, runner.infer):
            yield batch.feed
