"""How many replicas an SLO takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from qwenrt.plugins import QwenrtError

from ..load.trace import Slo
from .report import share_met
from .simulation import Cluster, Results, Simulation
from .workload import Arrival


def fewest_replicas(
    cluster: Cluster, arrivals: Iterable[Arrival], slo: Slo, share: float, on_try: Callable[[int, float], None]
) -> tuple[int, Results]:
    """The fewest replicas with which a `share` of the requests keeps `slo`, and how they do.

    Doubles from one until it is enough, then halves the interval; on_try is called with every count tried and its share. Raises
    QwenrtError if no number of them is enough.
    """

    def results_of(count: int) -> tuple[Results, bool]:
        results = Simulation(dataclasses.replace(cluster, replicas=count)).run(arrivals)
        met = share_met(results, slo)
        on_try(count, met)
        return results, met >= share

    too_few, enough = 0, 1
    results, good = results_of(enough)
    while not good:
        before = share_met(results, slo)
        too_few, enough = enough, 2 * enough
        results, good = results_of(enough)
        idle = results.busy < results.end * enough / 2
        if not good and idle and share_met(results, slo) <= before:
            raise QwenrtError(
                f"more than {too_few} replicas, idle most of the time, do not help: only {100 * before:.2f} % of the requests "
                "keep the SLO; loosen --slo-ttft or --slo-tpot, or take a faster machine"
            )
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        tried, good = results_of(middle)
        if good:
            enough, results = middle, tried
        else:
            too_few = middle
    return enough, results
