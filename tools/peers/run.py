"""Runs rivals and ours in turn, on an idle machine: python -m peers.run DIR ENGINE... --results FILE.json, where qwenrt is.

DIR: what setup.sh and weights.py have filled. ENGINE: engine folders of the same checkpoint. What is in FILE is kept, and
replaced where it is run again; the ratios are printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qwenrt.runtime import EngineDir
from qwenrt.tools.bench.workloads import WORKLOADS

from .report import report
from .weights import MAKERS

OURS = "qwenrt"
LIMITABLE = ["llama", OURS]


def commands(dir: Path, engines: list[Path]) -> dict[tuple[str, str], list[str]]:
    """The command that runs each engine, by its name and its weights: those that are there."""
    found = {}
    for rival, (kinds, _) in MAKERS.items():
        # llama.cpp's script is a client and runs in our environment.
        python = sys.executable if rival == "llama" else str(dir / rival / "bin" / "python")
        for weights in kinds:
            for model in (dir / "weights").glob(f"{rival}-{weights}*"):
                found[rival, weights] = [python, "-m", f"peers.{rival}", str(model)]
    for engine in engines:
        found[OURS, EngineDir.open(engine).manifest.weights] = [sys.executable, "-m", "peers.ours", str(engine)]
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("engines", type=Path, nargs="*")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--who", action="append", choices=[*MAKERS, OURS])
    parser.add_argument("--weights", action="append", choices=["float32", "int8", "int4"])
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--avx2", action="store_true", help="llama.cpp and our own kernels, without wider instructions")
    options = parser.parse_args(arguments)
    if options.avx2:
        options.who = options.who or LIMITABLE
        if others := set(options.who) - set(LIMITABLE):
            parser.error(f"{', '.join(sorted(others))} cannot be told to use AVX2 only; leave out --avx2 or --who")
    results: list[dict[str, Any]] = json.loads(options.results.read_text()) if options.results.exists() else []
    if any(one.get("avx2", False) != options.avx2 for one in results):
        parser.error(f"{options.results} has results {'without' if options.avx2 else 'with'} --avx2; give another file")
    tools = str(Path(__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [tools, os.environ.get("PYTHONPATH")])),
        "LLAMA_SERVER": str(
            options.dir.resolve() / ("llama-avx2-build" if options.avx2 else "llama-build") / "bin/llama-server"
        ),
    }
    environment["PEERS_ISA"] = "avx2" if options.avx2 else ""
    for (who, weights), command in commands(options.dir.resolve(), options.engines).items():
        if who in (options.who or [who]) and weights in (options.weights or [weights]):
            for workload in options.workload or WORKLOADS:
                line = [*command, "--workload", workload, "--repeats", str(options.repeats)]
                done = subprocess.run(line, env=environment, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{who}, {weights}, {workload}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
                found = json.loads(done.stdout.splitlines()[-1]) | {
                    "who": who,
                    "weights": weights,
                    "avx2": options.avx2,
                    "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
                }
                results = [one for one in results if not _same(one, found)] + [found]
                options.results.write_text(json.dumps(results, indent=1) + "\n")
                print(who, weights, workload, *(f"{rate:.4g}" for rate in found["tokens_per_s"]), flush=True)
    print(report(results))


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("who", "weights", "workload"))


if __name__ == "__main__":
    main()
