"""Stalls, times to serve again, schedules and rows: what is computed without a cluster."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.cluster.faults import KINDS
from support.cluster.figures import Confirmations, quantile
from support.cluster.history import (
    AnyEvent,
    Confirmed,
    Handed,
    HistoryWriter,
    ProducerMade,
    Received,
    handed,
    read_history,
    value_of,
)
from support.cluster.schedule import schedule, seconds_for_all
from support.cluster.scorecard import PROPERTY, Row, recorder, rows_of


def confirmations(*rows: tuple[float, float, int], topic: str = "t") -> list[AnyEvent]:
    """(sent at, confirmed at, ledger)."""
    made: list[AnyEvent] = [ProducerMade(topic, topic, 0, batched=True)]
    for number, (sent_at, at, ledger) in enumerate(rows):
        made.append(Confirmed(at, sent_at, topic, number, ((ledger, number, 0),)))
    return made


def test_stalls_and_slow_calls() -> None:
    found = Confirmations(confirmations((0.0, 0.1, 1), (1.0, 1.1, 1), (1.2, 4.0, 1), (4.0, 4.1, 1)))
    assert found.stall_s(0.0, 4.5) == pytest.approx(2.9)
    assert found.stall_s(4.1, 5.0) == pytest.approx(0.9)
    assert found.slowest_s(2.0, 3.0) == pytest.approx(2.8)  # it waited all the time
    assert found.slowest_s(4.05, 5.0) == pytest.approx(0.1)
    assert found.rate(0.0, 2.0) == 1.0


def test_a_topic_is_served_again_when_its_new_owner_confirms_what_was_sent_later() -> None:
    old_receipt_on_its_way = confirmations(
        (0.0, 0.1, 1), (0.9, 1.05, 1), (0.95, 3.0, 2), (2.0, 3.2, 2), topic="a"
    )
    stays = confirmations((0.0, 0.1, 3), (1.5, 1.6, 3), topic="b")
    never = confirmations((0.0, 0.1, 4), topic="c")
    unborn = confirmations((5.0, 5.1, 5), topic="d")
    found = Confirmations([*old_receipt_on_its_way, *stays, *never, *unborn])
    assert found.served_again_s(1.0) == [pytest.approx(2.2), float("inf")]
    assert (found.changed_ledger(1.0), found.changed_ledger(3.1), found.changed_ledger(0.0)) == (1, 0, 0)


def test_a_topic_that_is_handed_over_is_without_an_owner_from_one_confirmation_to_the_next() -> None:
    at_once = confirmations((0.0, 0.1, 1), (0.9, 1.3, 2), topic="a")
    served_meanwhile = confirmations((0.0, 0.1, 3), (1.4, 1.5, 3), (1.6, 1.8, 4), (2.5, 2.6, 5), topic="b")
    stays = confirmations((0.0, 0.1, 6), (1.5, 1.6, 6), topic="c")
    unborn = confirmations((5.0, 5.1, 7), (5.2, 5.3, 8), topic="d")
    found = Confirmations([*at_once, *served_meanwhile, *stays, *unborn])
    assert found.handed_over_s(1.0, 2.0) == [pytest.approx(0.3), pytest.approx(0.3)]
    assert found.handed_over_s(1.0, 1.7) == [pytest.approx(0.3)]
    assert found.handed_over_s(2.0, math.inf) == [pytest.approx(0.6)]


def test_quantiles_of_few_values() -> None:
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile(list(map(float, range(100))), 0.99) == 99.0


def test_a_seed_gives_the_same_faults_and_each_kind_comes_before_one_comes_again() -> None:
    kinds = sorted(KINDS)
    faults = schedule(7, kinds, 4.0 * len(kinds) * 2.5, 4.0)
    assert faults == schedule(7, kinds, 4.0 * len(kinds) * 2.5, 4.0)
    assert faults != schedule(8, kinds, 4.0 * len(kinds) * 2.5, 4.0)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    times = Counter(fault.kind for fault in faults)
    assert set(times) == set(kinds)
    assert max(times.values()) - min(times.values()) <= 1
    assert len(schedule(1, kinds, 1.0, 4.0)) == 1  # one at the least
    short = schedule(1, kinds, seconds_for_all(len(kinds), 4.0), 4.0)
    assert sorted(fault.kind for fault in short) == kinds


def test_a_history_comes_back_from_its_file_up_to_a_torn_end(tmp_path: Path) -> None:
    events: list[AnyEvent] = [
        *confirmations((0.0, 0.1, 1)),
        Received(1.0, "c", 2, (Handed((1, 0, 0), "t", 0, "k"),)),
    ]
    writer = HistoryWriter(tmp_path / "history")
    for event in events:
        writer.add(event)
    writer.close()
    assert list(read_history([tmp_path / "history"])) == events
    data = (tmp_path / "history").read_bytes()
    (tmp_path / "history").write_bytes(data[:-1])
    assert list(read_history([tmp_path / "history"])) == events[:-1]


def test_a_value_says_what_it_is() -> None:
    assert handed((1, 2, 3), value_of("p", 7, "k1", 60), "k1") == Handed((1, 2, 3), "p", 7, "k1")
    for value, key in ((value_of("p", 7, "k1", 60), "k2"), (b"\xff\xff", ""), (b"nothing", ""), (None, "")):
        assert handed((1, 2, 3), value, key).producer == ""


def test_rows_go_with_the_report_of_their_test() -> None:
    node = SimpleNamespace(user_properties=[("other", 1)])
    rows = [Row("9", "b", "", "", "", True), Row("10", "a", "", "", "", False)]
    for row in rows:
        recorder(node)(row)  # type: ignore[arg-type]
    assert [name for name, _ in node.user_properties] == ["other", PROPERTY, PROPERTY]
    reports = [
        SimpleNamespace(user_properties=node.user_properties, when=when) for when in ("call", "teardown")
    ]
    assert rows_of(reports) == rows  # by number
