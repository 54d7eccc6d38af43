"""Builds an engine with TensorRT for RTX, in a process of its own: an error in there may end it.

    python build_engine.py MODEL PLUGIN_LIBRARY COMPUTE_CAPABILITY ENGINE registry|loader

"registry" has TensorRT's registry load the plugin library, "loader" merely loads it, as polygraphy does. Prints JSON: the
creators that were registered, the warnings and errors, the network's outputs and layers, the engine's size (0: none built).
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import tensorrt_rtx as trt

# Smallest, usual and largest of every dimension that is not known.
RANGES = {
    "T": (1, 8, 64),
    "S": (1, 4, 16),
    "S1": (2, 5, 17),
    "max_blocks": (1, 8, 64),
    "num_blocks": (8, 64, 512),
}


class Log(trt.ILogger):  # type: ignore[misc]
    """Keeps warnings and errors."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.lines: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.WARNING:
            self.lines.append(f"{severity.name}: {message}")


def load(library: str, how: str) -> object:
    return trt.get_plugin_registry().load_library(library) if how == "registry" else ctypes.CDLL(library)


def profile_of(builder: Any, network: Any) -> Any:
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        value = network.get_input(i)
        names = [value.get_dimension_name(k) if size < 0 else "" for k, size in enumerate(value.shape)]
        if any(names):
            sizes = zip(names, value.shape, strict=True)
            ranges = [RANGES[name] if name else (size, size, size) for name, size in sizes]
            profile.set_shape(value.name, *zip(*ranges, strict=True))
    return profile


def main(model: str, library: str, capability: str, engine: str, how: str) -> None:
    log = Log()
    builder = trt.Builder(log)
    kept = load(library, how)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    built = None
    if trt.OnnxParser(network, log).parse_from_file(model):
        config = builder.create_builder_config()
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
        config.add_optimization_profile(profile_of(builder, network))
        built = builder.build_serialized_network(network, config)
    if built is not None:
        Path(engine).write_bytes(bytes(built))
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    told = {
        "creators": [
            f"{c.plugin_namespace}/{c.name}/{c.plugin_version}" for c in trt.get_plugin_registry().all_creators
        ],
        "log": log.lines,
        "outputs": {value.name: [list(value.shape), value.dtype.name] for value in outputs},
        "layers": [network.get_layer(i).type.name for i in range(network.num_layers)],
        "bytes": 0 if built is None else built.nbytes,
    }
    print(json.dumps(told))
    del kept


if __name__ == "__main__":
    main(*sys.argv[1:])
