"""The tables of the comparison with rivals."""

from __future__ import annotations

from typing import Any

from peers.report import rate, ratio, report


def result(
    who: str, weights: str, workload: str, *rates: float, mib: int = 100, load_s: float = 1.0, **more: Any
) -> Any:
    measured = {"tokens_per_s": list(rates), "other_cpus": [0.0] * len(rates), "peak_rss_bytes": mib << 20}
    return {"who": who, "weights": weights, "workload": workload, "load_s": load_s} | measured | more


def test_a_ratio_above_one_is_better_than_the_best_rival() -> None:
    assert ratio(30.0, [10.0, 20.0], higher_is_better=True) == 1.5
    assert ratio(30.0, [60.0, 45.0], higher_is_better=False) == 1.5
    assert ratio(None, [10.0], higher_is_better=True) is None
    assert ratio(30.0, [], higher_is_better=True) is None


def test_a_run_that_others_disturbed_counts_only_if_there_is_no_other() -> None:
    disturbed = result("llama", "int4", "decode", 10.0, 80.0, 90.0, other_cpus=[1.2, 0.0, 0.1])
    assert rate(disturbed) == (85.0, True)
    assert rate(disturbed | {"other_cpus": [1.2, 0.5, 0.9]}) == (80.0, False)


def test_a_table_for_each_kind_of_weights_with_ratios_and_what_is_missing() -> None:
    text = report(
        [
            result("qwenrt", "int8", "decode", 30.0, mib=200, load_s=0.5),
            result("openvino", "int8", "decode", 20.0, mib=300, load_s=2.0),
            result("llama", "int8", "decode", 15.0, mib=150, load_s=1.0),
            result("llama", "int8", "batch", 60.0, mib=400, other_cpus=[0.8]),
            result("qwenrt", "int4", "decode", 50.0),
        ]
    )
    four, eight = text.split("\n\n")
    assert four.splitlines() == [
        "| int4 | qwenrt | ours to the best rival |",
        "| --- | --- | --- |",
        "| decode, tok/s | 50 | - |",
        "| peak memory, decode, MiB | 100 | - |",
        "| load, s | 1.00 | - |",
    ]
    assert eight.splitlines() == [
        "| int8 | llama | openvino | qwenrt | ours to the best rival |",
        "| --- | --- | --- | --- | --- |",
        "| decode, tok/s | 15 | 20 | 30 | 1.50x |",
        "| batch, tok/s | 60* | - | - | - |",
        "| peak memory, decode, MiB | 150 | 300 | 200 | 0.75x |",
        "| peak memory, batch, MiB | 400 | - | - | - |",
        "| load, s | 1.00 | 2.00 | 0.50 | 2.00x |",
    ]
