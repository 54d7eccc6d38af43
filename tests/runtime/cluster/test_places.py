"""Which replica a request goes to when replicas come and go, and what is counted as its."""

from __future__ import annotations

import pickle

import pytest

from qwenrt.runtime.cluster.places import Places
from qwenrt.runtime.cluster.ticket import ReplicaLoad, Ticket
from qwenrt.runtime.routing import prefix_key

KEYS = [prefix_key([number] * 64, 16) for number in range(200)]


def homes(places: Places[str]) -> list[str]:
    return [places.choose(key, 100).replica for key in KEYS]


@pytest.fixture
def places() -> Places[str]:
    places: Places[str] = Places()
    places.update({"a", "b", "c"}, 0)
    return places


def test_the_prefixes_of_a_lost_replica_alone_go_elsewhere_and_its_successor_gets_them_back(
    places: Places[str],
) -> None:
    before = homes(places)
    assert set(before) == {"a", "b", "c"}
    places.update({"a", "c"}, 10)
    without = homes(places)
    assert [now for was, now in zip(before, without, strict=True) if was != "b"] == [
        one for one in before if one != "b"
    ]
    assert set(without) == {"a", "c"}
    places.update({"a", "c", "d"}, 20)
    assert homes(places) == ["d" if one == "b" else one for one in before]


def test_a_replica_that_was_away_for_a_moment_gets_its_place_back(places: Places[str]) -> None:
    before = homes(places)
    places.update({"a", "c"}, 10)
    places.update({"a", "b", "c"}, 20)
    assert homes(places) == before


def test_a_place_that_stays_vacant_is_given_up(places: Places[str]) -> None:
    places.update({"b", "c"}, 10)
    places.update({"b", "c"}, 1000)
    assert [place.replica for place in places.all] == ["c", "b"]
    places.update({"c"}, 2000)
    places.update({"c"}, 3000)
    assert [place.replica for place in places.all] == ["c"]


def test_when_all_are_replaced_one_by_one_no_request_goes_to_one_that_is_gone(places: Places[str]) -> None:
    there = ["a", "b", "c"]
    for step, (old, new) in enumerate(zip("abc", "xyz", strict=True)):
        there.append(new)
        places.update(set(there), step)
        there.remove(old)
        places.update(set(there), step + 0.5)
        assert set(homes(places)) <= set(there)
    assert set(homes(places)) == {"x", "y", "z"}


def test_a_ticket_counts_at_one_replica_at_a_time_and_until_its_request_is_over() -> None:
    first, second = ReplicaLoad(), ReplicaLoad()
    with Ticket(None, 7) as ticket:
        ticket.charge(first)
        ticket.charge(first)
        assert (first.tokens, second.tokens) == (7, 0)
        ticket.charge(second)
        assert (first.tokens, second.tokens) == (0, 7)
    assert (first.tokens, second.tokens) == (0, 0)
    ticket.charge(first)
    assert first.tokens == 0


def test_the_copy_of_a_ticket_that_a_replica_gets_counts_nowhere() -> None:
    load = ReplicaLoad()
    with Ticket(b"key", 7) as ticket:
        ticket.charge(load)
        with pickle.loads(pickle.dumps(ticket)) as copy:
            assert (copy.key, copy.tokens) == (b"key", 7)
        assert load.tokens == 7


def test_a_busy_home_is_left_for_another(places: Places[str]) -> None:
    home = places.choose(KEYS[0], 100)
    home.load.tokens = 101
    assert places.choose(KEYS[0], 100) is not home
    home.load.tokens = 100
    assert places.choose(KEYS[0], 100) is home
