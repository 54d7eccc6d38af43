"""What the parts found, as one table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .parts import Result, Row, Status

TARGETS = {"decode": 0.85, "prefill": 0.45, "rope": 0.80, "experts": 0.70}
"""Of the rate that the same GPU reached: of the copy's bytes, or of the matrix product's FLOPs, a second."""
MAX_ERROR = 0.02
"""|difference| over |expected| in bfloat16, ours against torch's."""
OTHERS = ("flashinfer", "xqa")
"""Parts that time others' kernels at our sizes."""
_HEADER = ("kernel", "pool", "size", "time", "rate", "of peak", "target", "whole op", "torch", *OTHERS, "error")


def op_suite_passed(results: Iterable[Result]) -> bool:
    """Whether the op suite ran to its end and every case of it passed."""
    suites = [result for result in results if result.name == "op suite"]
    return bool(suites) and all(
        suite.status is Status.PASSED and suite.rows and all(row["passed"] for row in suite.rows) for suite in suites
    )


def write_json(path: Path, machine: Row, results: Sequence[Result]) -> None:
    """Everything that was found; a number that is not finite becomes null."""
    parts = [
        {
            "name": result.name,
            "status": result.status,
            "seconds": round(result.seconds, 1),
            "error": result.error,
            "rows": [_finite(row) for row in result.rows],
        }
        for result in results
    ]
    document = {"machine": machine, "op_suite_passed": op_suite_passed(results), "parts": parts}
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def _finite(row: Row) -> Row:
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}


def text(results: Sequence[Result]) -> str:
    """A line a part, then a line a measurement."""
    lines = [_part_line(result) for result in results]
    for result in results:
        lines += [f"  {row['case']}: {row['error']}" for row in result.rows if row.get("passed") is False]
    rows = timings(results)
    if rows:
        lines += ["", *_table([_HEADER, *rows])]
    return "\n".join(lines)


def timings(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The table's rows, in the columns of its header."""
    found = {result.name: result.rows for result in results}
    peaks = {row["what"]: row.get("bytes", row.get("flops")) / row["seconds"] for row in found.get("rates", ())}
    others = [{_size(row): row for row in found.get(name, ())} for name in OTHERS]
    lines = [
        (what, "", "", "", _rate(rate, "FLOP/s" if "matmul" in what else "B/s"), *[""] * (len(_HEADER) - 5))
        for what, rate in peaks.items()
    ]
    for kernel in TARGETS:
        for row in found.get(kernel, ()):
            size = _size(row)
            if "skipped" in row:
                lines.append((kernel, row["pool"], size, row["skipped"], *[""] * (len(_HEADER) - 4)))
                continue
            rate = row.get("bytes", row.get("flops", 0)) / row["seconds"]
            peak = "bf16 matmul" if "flops" in row else "copy"
            reached = rate / peaks[peak] if peak in peaks else None
            same = row["pool"] == "bfloat16" and kernel in ("decode", "prefill")
            lines.append(
                (
                    kernel,
                    row["pool"],
                    size,
                    _time(row["seconds"]),
                    _rate(rate, "FLOP/s" if "flops" in row else "B/s"),
                    "" if reached is None else f"{reached:.0%}",
                    _verdict(kernel, row, reached),
                    _time(row.get("op_seconds")),
                    _beside(row["seconds"], row.get("torch_seconds")),
                    *(_other(row["seconds"], rows.get(size) if same else None) for rows in others),
                    _error(row.get("error")),
                )
            )
    return lines


def _part_line(result: Result) -> str:
    passed = [row["passed"] for row in result.rows if "passed" in row]
    cases = f", {sum(passed)} of {len(passed)} cases passed" if passed else ""
    error = f": {result.error}" if result.error else ""
    return f"{result.name}: {result.status} in {result.seconds:.0f} s{cases}{error}"


def _size(row: Row) -> str:
    return f"{row['batch']} x {row['context']}" if "batch" in row else f"{row['tokens']} tokens"


def _verdict(kernel: str, row: Row, reached: float | None) -> str:
    """Whether the target is met, at the size that it is set for."""
    at = {"decode": (64, 4096), "prefill": (4096,), "rope": (16384,), "experts": (16,)}[kernel]
    size = (row["batch"], row["context"]) if kernel == "decode" else (row["tokens"],)
    if reached is None or size != at or row["pool"] != "bfloat16":
        return ""
    return f"{TARGETS[kernel]:.0%} {'met' if reached >= TARGETS[kernel] else 'MISSED'}"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f} us"


def _beside(ours: float, theirs: float | None) -> str:
    return "" if theirs is None else f"{theirs * 1e6:.1f} us ({theirs / ours:.2f}x)"


def _other(ours: float, row: Row | None) -> str:
    """The time of another's kernel, if it computed the same."""
    if row is None:
        return ""
    return _beside(ours, row["seconds"]) if row.get("error", 0.0) < MAX_ERROR else "computes something else"


def _rate(rate: float, unit: str) -> str:
    return f"{rate / 1e12:.2f} T{unit}"


def _error(error: Any) -> str:
    if error is None:
        return ""
    return f"{error:.1e}" + ("" if error < MAX_ERROR else " TOO LARGE")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
