"""The figures of several replicas as those of one server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_MAX_GONE = 16
"""Of so many replicas that did not answer the figures are kept as they are, for one may only have been late."""
_Series = tuple[str, tuple[tuple[str, str], ...]]


class MergedMetrics(Collector):
    """Sums of counters, histograms and gauges; of shares (`_perc`) the mean, for all replicas have pools of one size.

    Counters go on from where a replica that is gone left them: what Prometheus sees must not fall.
    """

    def __init__(self) -> None:
        self._latest: dict[str, list[Metric]] = {}
        self._ended: dict[str, Metric] = {}
        """Sums of replicas that are gone for good."""
        self._present: set[str] = set()

    def text(self, answers: Mapping[str, str]) -> bytes:
        """All figures in Prometheus' text format; `answers` has those of each replica there is, by its name."""
        for replica, answer in answers.items():
            families = text_string_to_metric_families(answer)
            # The time when a counter began does not add up.
            self._latest[replica] = [family for family in families if not family.name.endswith("_created")]
        self._present = set(answers)
        gone = [replica for replica in self._latest if replica not in answers]
        for replica in gone[:-_MAX_GONE]:
            past = [family for family in self._latest.pop(replica) if family.type != "gauge"]
            self._ended = _summed([*self._ended.values(), *past])
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """The families, for `generate_latest`."""
        families = list(self._ended.values())
        for replica, own in self._latest.items():
            for family in own:
                if family.type != "gauge":
                    families.append(family)
                elif replica in self._present:
                    families.append(
                        _scaled(family, 1 / len(self._present)) if family.name.endswith("_perc") else family
                    )
        yield from _summed(families).values()
        yield GaugeMetricFamily("qwenrt:replicas", "Engines that share the requests.", len(self._present))
        generated = CounterMetricFamily(
            "qwenrt:replica_generation_tokens", "Tokens that each of them generated.", labels=["replica"]
        )
        for replica in sorted(self._present):
            samples = [sample for family in self._latest[replica] for sample in family.samples]
            tokens = sum(sample.value for sample in samples if sample.name == "vllm:generation_tokens_total")
            generated.add_metric([replica], tokens)
        yield generated


def _scaled(family: Metric, factor: float) -> Metric:
    result = Metric(family.name, family.documentation, family.type)
    for sample in family.samples:
        result.add_sample(sample.name, sample.labels, sample.value * factor)
    return result


def _summed(families: Iterable[Metric]) -> dict[str, Metric]:
    """One family of each name, whose samples are the sums of those with the same name and labels."""
    result: dict[str, Metric] = {}
    sums: dict[str, dict[_Series, float]] = defaultdict(lambda: defaultdict(float))
    for family in families:
        result.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            sums[family.name][sample.name, tuple(sample.labels.items())] += sample.value
    for name, series in sums.items():
        for (sample_name, labels), value in series.items():
            result[name].add_sample(sample_name, dict(labels), value)
    return result
