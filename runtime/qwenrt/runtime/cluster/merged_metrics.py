"""The figures of several replicas as those of one server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_Series = tuple[str, tuple[tuple[str, str], ...]]


class MergedMetrics(Collector):
    """Sums of counters, histograms and gauges; of shares (`_perc`) the mean, for all replicas have pools of one size.

    Counters go on from where a replica that is gone left them: what Prometheus sees must not fall.
    """

    def __init__(self) -> None:
        self._latest: dict[str, list[Metric]] = {}
        self._present: set[str] = set()

    def text(self, answers: Mapping[str, str]) -> bytes:
        """All figures in Prometheus' text format; `answers` has those of each replica there is, by its name."""
        for replica, answer in answers.items():
            families = text_string_to_metric_families(answer)
            # The time when a counter began does not add up.
            self._latest[replica] = [family for family in families if not family.name.endswith("_created")]
        self._present = set(answers)
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """The families, for `generate_latest`."""
        merged: dict[str, Metric] = {}
        sums: dict[str, dict[_Series, float]] = defaultdict(lambda: defaultdict(float))
        for replica, families in self._latest.items():
            for family in families:
                if family.type == "gauge" and replica not in self._present:
                    continue
                merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                share = 1 / len(self._present) if family.name.endswith("_perc") else 1
                for sample in family.samples:
                    sums[family.name][sample.name, tuple(sample.labels.items())] += sample.value * share
        for name, metric in merged.items():
            for (sample_name, labels), value in sums[name].items():
                metric.add_sample(sample_name, dict(labels), value)
            yield metric
        yield GaugeMetricFamily("qwenrt:replicas", "Engines that share the requests.", len(self._present))
        generated = CounterMetricFamily(
            "qwenrt:replica_generation_tokens", "Tokens that each of them generated.", labels=["replica"]
        )
        for replica in sorted(self._present):
            samples = [sample for family in self._latest[replica] for sample in family.samples]
            tokens = sum(sample.value for sample in samples if sample.name == "vllm:generation_tokens_total")
            generated.add_metric([replica], tokens)
        yield generated
