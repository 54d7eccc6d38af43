"""Checks and times the CUDA kernels on GPU 0 of this machine. Needs nvcc, PyTorch with CUDA, numpy and ml_dtypes; no network, and
nothing of qwenrt installed.

    python tools/gpu_check --json gpu_check.json
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE.parent), str(HERE.parents[1] / "plugins")]
# Run as a folder, this is a program whose own files stand first among all modules, under names that others may have too.
sys.path = [*PATHS, *(path for path in sys.path if Path(path).absolute() != HERE)]

from gpu_check.parts import Part, Result, Row, run_part  # noqa: E402
from gpu_check.report import OTHERS, op_suite_passed, text, write_json  # noqa: E402
from setup.nvidia import cuda_home  # noqa: E402

SECONDS = 570.0
BUILD = "build"


def parts(library: Path, sanitizer: str | None) -> list[Part]:
    """Every part in its order, with its own time limit; each runs even if others fail, except that all need the library."""

    def module(name: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", f"gpu_check.{name}", *arguments]

    def sanitized(tool: str) -> list[str]:
        log = str(library.with_name(f"{tool}.log"))
        report = ["--error-exitcode", "99", "--log-file", log]
        return [str(sanitizer), "--tool", tool, *report, *module("op_suite", str(library), "--small")]

    no_sanitizer = None if sanitizer else "compute-sanitizer is not installed"
    no_flashinfer = None if importlib.util.find_spec("flashinfer") else "flashinfer is not installed"
    bench = {
        name: module("bench", str(library), name) for name in ("rates", "rope", "decode", "prefill", "experts", *OTHERS)
    }
    return [
        Part(BUILD, module("build", str(library)), 90),
        Part("op suite", module("op_suite", str(library)), 90),
        Part("rates", bench["rates"], 30),
        Part("decode", bench["decode"], 70),
        Part("prefill", bench["prefill"], 40),
        Part("rope", bench["rope"], 30),
        Part("experts", bench["experts"], 40),
        Part("memcheck", sanitized("memcheck"), 60, no_sanitizer),
        Part("racecheck", sanitized("racecheck"), 60, no_sanitizer),
        Part("flashinfer", bench["flashinfer"], 50, no_flashinfer),
        Part("xqa", bench["xqa"], 40, no_flashinfer),
    ]


def run_all(chosen: Sequence[Part], seconds: float) -> list[Result]:
    """Runs the parts one after another, telling on stderr what is going on. Without a library there is nothing else to run."""
    deadline = time.monotonic() + seconds
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])}
    results: list[Result] = []
    for part in chosen:
        print(f"gpu_check: {part.name} (at most {part.seconds:.0f} s)", file=sys.stderr, flush=True)
        results.append(run_part(part, deadline - time.monotonic(), environment))
        if part.name == BUILD and not results[-1].rows:
            break
    return results


def machine() -> Row:
    """What this was measured on. Raises RuntimeError with one line if it cannot be measured here."""
    try:
        import torch
    except ModuleNotFoundError:
        raise RuntimeError(f"PyTorch is missing in {sys.executable}; install torch with CUDA") from None
    if not torch.cuda.is_available():
        raise RuntimeError(f"PyTorch {torch.__version__} sees no GPU; gpu_check needs one, of sm_80 or later")
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda_home": str(cuda_home()),
    }


def find_sanitizer() -> str | None:
    """compute-sanitizer of the toolkit, or on the PATH."""
    return shutil.which(
        "compute-sanitizer", path=os.pathsep.join([str(cuda_home() / "bin"), os.environ.get("PATH", "")])
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 if the op suite passed, 1 if it did not or could not run, 2 on bad usage."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found to FILE")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="for everything together (default: %(default).0f)"
    )
    options = parser.parse_args(arguments)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds:g}: must be positive")
    try:
        found = machine()
    except (RuntimeError, FileNotFoundError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        results = run_all(parts(Path(folder) / "libqwenrt_cuda.so", find_sanitizer()), options.seconds)
    print(f"{found['gpu']}, sm {found['compute_capability']}, torch {found['torch']}")
    print(text(results))
    if options.json:
        write_json(options.json, found, results)
    passed = op_suite_passed(results)
    print(f"\nop suite: {'passed' if passed else 'FAILED'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
