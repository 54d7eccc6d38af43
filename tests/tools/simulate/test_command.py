"""`qwenrt simulate`: figures on stdout, the table on stderr, and how far a prediction is off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..command import qwenrt
from ..conftest import Here

HARDWARE = ("--bandwidth", "1GB", "--flops", "1e11", "--overhead", "0.5")


def simulated(here: Here, *arguments: str | Path) -> dict[str, Any]:
    status, stdout, stderr = here("simulate", *arguments)
    assert status == 0, stderr
    assert "time to first token, p99" in stderr
    result: dict[str, Any] = json.loads(stdout)
    return result


def test_a_manifest_and_hardware_figures_are_enough(tiny_engine: Path, here: Here, tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    options = ("--rate", "20", "--requests", "60", "--prompt-tokens", "5-20", "--new-tokens", "4-8")
    first = simulated(here, tiny_engine / "engine.json", *HARDWARE, *options, "--save-cost", cost)
    summary = first["simulated"]
    assert (summary["requests"], summary["refused"]) == (60, 0)
    assert summary["slo_share"] == 1.0 and summary["goodput_per_s"] == summary["requests_per_s"]
    assert 0 < summary["ttft_ms"]["p50"] <= summary["ttft_ms"]["p99"] <= summary["e2e_ms"]["p99"]
    assert 0 < summary["busy_share"] < 1 and 0 < summary["kv_used_share"] <= summary["kv_peak_share"] <= 1
    again = simulated(here, tiny_engine, "--cost", cost, *options, "--plots", tmp_path / "plots")
    assert again["simulated"] == summary
    assert all((tmp_path / "plots" / name).stat().st_size > 5000 for name in ("latency.png", "load.png"))


def test_the_fewest_replicas_that_keep_the_slo_are_found(tiny_engine: Path, here: Here) -> None:
    options = (
        "--rate",
        "1500",
        "--requests",
        "100",
        "--prompt-tokens",
        "8-20",
        "--new-tokens",
        "8-16",
        "--max-num-seqs",
        "4",
    )
    slo = ("--slo-ttft", "20", "--slo-tpot", "20")
    result = simulated(here, tiny_engine, *HARDWARE, *options, *slo, "--find-replicas", "0.95")
    found, tries = result["simulated"]["replicas"], result["share_by_replicas"]
    assert found > 1
    assert tries[str(found)] >= 0.95 > tries[str(found - 1)]
    status, _, stderr = here(
        "simulate", tiny_engine, *HARDWARE, *options, "--slo-ttft", "0.01", "--find-replicas", "0.9"
    )
    assert status == 1 and "only 0.00 % of the requests keep the SLO; loosen --slo-ttft" in stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--bandwidth", "1GB"), 2, "--bandwidth and --flops go together"),
        ((*HARDWARE, "--time-scale", "2"), 2, "without --trace"),
        ((*HARDWARE, "--validate"), 2, "--validate measures one engine here"),
        ((*HARDWARE, "--max-num-seqs", "100000"), 1, "lower max_num_seqs"),
        ((*HARDWARE, "--kv-memory", "10"), 1, "less than one KV block"),
    ],
)
def test_bad_usage_is_said(
    tiny_engine: Path, here: Here, arguments: tuple[str, ...], status: int, message: str
) -> None:
    actual, _, stderr = here("simulate", tiny_engine, *arguments)
    assert actual == status
    assert message in " ".join(stderr.split())


@pytest.mark.slow
def test_a_prediction_is_put_beside_what_the_engine_does(demo_engine: Path) -> None:
    """How near it is depends on how steady the machine is, so that is printed and not asserted."""
    load = (
        "--rate",
        "10",
        "--requests",
        "60",
        "--prompt-tokens",
        "64-512",
        "--new-tokens",
        "16-96",
        "--shared-tokens",
        "32",
    )
    status, stdout, stderr = qwenrt("simulate", demo_engine, "--validate", *load)
    assert status == 0, stderr
    result = json.loads(stdout)
    predicted, real = result["simulated"], result["measured"]
    for name in ("requests", "refused", "output_tokens"):
        assert predicted[name] == real[name]
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert predicted[name]["mean"] > 0 and real[name]["mean"] > 0
    print(stderr)
