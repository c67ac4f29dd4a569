"""The demo counts honestly: what is lost, altered, out of order or redelivered shows, and the exit code says so."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from deploy.demo.demo import Child, Demo, Outcome, figures_of, table, worker_names
from deploy.demo.demo_roles import Record
from rich.console import Console


def flight(number: int, **more: Any) -> bytes:
    return json.dumps({"id": number, **more}).encode()


class Story:
    """Three flights, all well; tests spoil it."""

    def __init__(self, tmp_path: Path) -> None:
        arguments = argparse.Namespace(count=3, seconds=1.0, data=None)
        self.demo = Demo(arguments, tmp_path, Console(quiet=True))
        self.records = {name: Record.empty(3) for name in ("producer", "reader", *worker_names())}
        for number in range(3):
            for name in ("producer", "reader", "worker-1"):
                self.records[name].note(flight(number))
            self.records["worker-1"].received.append((b"id%d" % number, 1.0))
            self.records["worker-1"].receipts.append((b"id%d" % number, 2.0))

    def outcome(self) -> Outcome:
        for name, record in self.records.items():
            path = self.demo.directory / name
            record.save(path)
            process = cast(Any, SimpleNamespace(returncode=0))
            self.demo.children[name] = Child(name, process, path, {"failed": 0})
        return self.demo._compare(1.0)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_all_is_well(story: Story) -> None:
    outcome = story.outcome()
    assert outcome.good
    assert (outcome.confirmed, outcome.tailed, outcome.worked, outcome.acknowledged) == (3, 3, 3, 3)
    assert table(outcome).row_count >= 12


def test_confirmed_and_not_tailed_is_lost(story: Story) -> None:
    story.records["reader"].hashes[1] = 0
    outcome = story.outcome()
    assert (outcome.lost_tail, outcome.good) == (1, False)


def test_confirmed_and_not_worked_is_lost(story: Story) -> None:
    story.records["worker-1"].hashes[2] = 0
    outcome = story.outcome()
    assert (outcome.lost_work, outcome.good) == (1, False)


def test_a_worker_may_have_what_the_other_has_not(story: Story) -> None:
    story.records["worker-1"].hashes[2] = 0
    story.records["worker-2"].note(flight(2))
    assert story.outcome().good


def test_other_content_is_altered(story: Story) -> None:
    story.records["reader"] = Record.empty(3)
    for number in range(3):
        story.records["reader"].note(flight(number, spoilt=True) if number == 1 else flight(number))
    outcome = story.outcome()
    assert (outcome.altered, outcome.good) == (1, False)


@pytest.mark.parametrize(("worker", "when"), [("worker-1", 2.001), ("worker-2", 2.3)])
def test_delivered_after_the_receipt_is_redelivered_whoever_got_it(
    story: Story, worker: str, when: float
) -> None:
    story.records[worker].received.append((b"id0", when))
    outcome = story.outcome()
    assert (outcome.redelivered, outcome.returned, outcome.good) == (1, 0, False)


def test_a_delivery_may_cross_the_receipt_of_the_other_worker(story: Story) -> None:
    story.records["worker-2"].received.append((b"id0", 2.1))
    story.records["worker-2"].receipts.append((b"id0", 2.2))
    outcome = story.outcome()
    assert (outcome.redelivered, outcome.crossed, outcome.acknowledged, outcome.good) == (0, 1, 3, True)


def test_delivered_again_before_the_receipt_is_allowed(story: Story) -> None:
    story.records["worker-2"].received.append((b"id0", 1.5))
    outcome = story.outcome()
    assert (outcome.redelivered, outcome.returned, outcome.good) == (0, 1, True)


def test_unconfirmed_is_not_good(story: Story) -> None:
    story.records["producer"].hashes[0] = 0
    assert not story.outcome().good


def test_duplicates_are_counted_and_first_occurrences_must_be_in_order(story: Story) -> None:
    reader = Record.empty(3)
    for number in (0, 2, 1, 1):
        reader.note(flight(number))
    assert (reader.distinct, reader.duplicates, reader.out_of_order) == (3, 1, 1)
    story.records["reader"] = reader
    outcome = story.outcome()
    assert (outcome.stored_twice, outcome.out_of_order, outcome.good) == (1, 1, False)


def test_nothing_is_tailed_or_worked_that_is_not_produced_yet() -> None:
    """The processes say how far they are one after another."""
    children = {
        "producer": {"sent": 100, "confirmed": 90},
        "reader": {"tailed": 130, "duplicates": 10},
        "worker-1": {"acknowledged": 60},
        "worker-2": {"acknowledged": 50},
    }
    assert figures_of(children, 500) == {"produced": 120, "confirmed": 90, "tailed": 120, "worked": 110}
    assert figures_of({}, 500) == {"produced": 0, "confirmed": 0, "tailed": 0, "worked": 0}
