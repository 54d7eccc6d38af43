"""What makes polygraphy's own command line work on engine folders, found by the entry point `polygraphy.run.plugins`.

polygraphy calls `argument_groups` at the start of each of its commands. From then on its ONNX Runtime sessions and the onnx
package know our ops; `polygraphy run` has our runners (`--qwenrt-torch` and so on) and, given an engine and no inputs,
gets valid paged batches in the place of random numbers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from polygraphy.backend.onnx import InferShapes
from polygraphy.constants import MARK_ALL
from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import DataLoaderArgs, ModelArgs, OnnxLoadArgs
from polygraphy.tools.args.base import BaseArgs, BaseRunnerArgs
from polygraphy.tools.script import make_invocable

from qwenrt.plugins import QwenrtError
from qwenrt.plugins.library import cpu_library
from qwenrt.plugins.schema import register_onnx_schemas
from qwenrt.runtime import EngineDir
from qwenrt.runtime.engine_dir import MANIFEST_NAME

from . import load_data
from .references import NAMES, OF_A_CHECKPOINT, ReferenceSpec, load_reference
from .runners.base import PagedRunner

_RUNNERS = tuple(name for name in NAMES if name != "onnxruntime")
"""polygraphy has --onnxrt for the other."""


class EngineArgs(BaseArgs):  # type: ignore[misc]
    """
    qwenrt Engines: comparing engine folders of qwenrt.

    Depends on:

        - ModelArgs
        - DataLoaderArgs
    """

    def add_parser_args_impl(self) -> None:
        """Add --qwenrt-reference."""
        self.group.add_argument(
            "--qwenrt-reference",
            metavar="CHECKPOINT",
            help=f"The checkpoint folder that the engine was exported from, for {_options(OF_A_CHECKPOINT)}",
        )

    def parse_impl(self, args: Any) -> None:
        """Find the engine folder, and let it have valid batches where no inputs are given."""
        self.checkpoint: str | None = args.qwenrt_reference
        path = self.arg_groups[ModelArgs].path
        folder = Path(path).resolve().parent if path else None
        self.engine: Path | None = folder if folder is not None and (folder / MANIFEST_NAME).is_file() else None
        data = self.arg_groups[DataLoaderArgs]
        if self.engine is not None and data.is_using_random_data():
            G_LOGGER.info(f"qwenrt: no inputs are given, so valid paged batches are made for {self.engine}")
            os.environ[load_data.VARIABLE] = str(self.engine)
            data.data_loader_script, data.data_loader_func_name = load_data.__file__, "load_data"


class _RunnerArgs(BaseRunnerArgs):  # type: ignore[misc]
    """
    qwenrt Runner: one of qwenrt's references.

    Depends on:

        - EngineArgs
        - OnnxLoadArgs
    """

    runner = ""

    def get_name_opt_impl(self) -> tuple[str, str]:
        """The runner's name for people, and its option without dashes."""
        return f"qwenrt's {self.runner} reference", f"qwenrt-{self.runner}"

    def add_to_script_impl(self, script: Any) -> None:
        """Add the runner to the script that polygraphy runs."""
        engine = self.arg_groups[EngineArgs]
        if engine.engine is None:
            G_LOGGER.critical(
                f"--qwenrt-{self.runner} needs the model.onnx of an engine folder, beside its {MANIFEST_NAME}"
            )
        outputs = self.arg_groups[OnnxLoadArgs].outputs
        script.add_import(imports=["reference_runner"], frm=__name__)
        script.add_runner(
            make_invocable("reference_runner", self.runner, str(engine.engine), engine.checkpoint, outputs or None)
        )


def argument_groups() -> list[BaseArgs]:
    """polygraphy's entry point: the argument groups of `polygraphy run`. Also makes our ops known in this process."""
    register_onnx_schemas()
    ort.SessionOptions = _options_with_our_ops(str(cpu_library()))
    InferShapes._run_onnxruntime_shape_inference = _infer_shapes
    runners = [
        type(f"{name.title()}Args", (_RunnerArgs,), {"__doc__": _RunnerArgs.__doc__, "runner": name})
        for name in _RUNNERS
    ]
    return [EngineArgs(), *(kind() for kind in runners)]


def reference_runner(name: str, engine: str, checkpoint: str | None, outputs: list[str] | str | None) -> PagedRunner:
    """The runner behind --qwenrt-NAME; ends polygraphy with the reason if there is none.

    outputs: as --onnx-outputs has them: names, or that all are to be marked, which means all that the runner has.
    """
    try:
        spec, folder = ReferenceSpec.parse(name), EngineDir.open(engine)
        runner = load_reference(spec, folder, None if checkpoint is None else Path(checkpoint))
    except QwenrtError as error:
        G_LOGGER.critical(str(error).replace("--reference", "--qwenrt-reference").replace("--against ", "--qwenrt-"))
    if outputs:
        runner.outputs = runner.tensors if outputs == MARK_ALL else list(outputs)
    return runner


def _options_with_our_ops(library: str) -> type[ort.SessionOptions]:
    class SessionOptions(ort.SessionOptions):  # type: ignore[misc]
        """ONNX Runtime's, with our ops registered: polygraphy has no way to pass a custom-op library."""

        def __init__(self) -> None:
            super().__init__()
            super().register_custom_ops_library(library)

        def register_custom_ops_library(self, path: str) -> None:
            """Register a library; ours is there already, and ONNX Runtime takes none twice."""
            if path != library:
                super().register_custom_ops_library(path)

    return SessionOptions


def _infer_shapes(loader: InferShapes, model: onnx.ModelProto | str, external_data_dir: str | None) -> onnx.ModelProto:
    """onnx's shape inference, which asks our schemas, in the place of ONNX Runtime's symbolic one.

    That one goes by the names of operators alone, and takes our PagedAttention for the one of com.microsoft, whose results have
    other shapes.
    """
    inferred: onnx.ModelProto = loader._run_onnx_shape_inference(model, external_data_dir)
    return inferred


def _options(names: tuple[str, ...]) -> str:
    return " and ".join(f"--qwenrt-{name}" for name in names)
