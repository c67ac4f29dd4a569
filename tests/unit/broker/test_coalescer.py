"""Groups of a turn become entries; receipts come in runs."""

from typing import Any

from magnetar.broker.topics.coalescer import Coalescer, GatheredEntry, measure
from magnetar.broker.topics.core.producers import ProducerSession
from magnetar.proto.admission import AdmittedGroups
from magnetar.proto.batch import encode_batch
from magnetar.proto.entry import Entry
from magnetar.proto.ids import MAX_MESSAGES_PER_BATCH


class NoPort:
    peer: Any = None

    def receipts(self, rows: object) -> None: ...
    def send_failed(self, sequence_id: int, error: object) -> None: ...
    def send_delayed(self, error: object) -> None: ...

    def hold(self, reason: str) -> None: ...
    def producer_closed(self, error: object) -> None: ...


def session(name: str = "p") -> ProducerSession:
    return ProducerSession(name, 0, NoPort())


def groups(first: int, count: int, size: int = 10) -> AdmittedGroups:
    ids = list(range(first, first + count))
    return AdmittedGroups(
        [encode_batch([b"x" * size], sequence_id=n, publish_time_ms=0) for n in ids], [1] * count, ids
    )


def add(
    coalescer: Coalescer, producer: ProducerSession, admitted: AdmittedGroups, whole: bool = False
) -> None:
    coalescer.add(producer, admitted, measure(admitted), whole=whole)


def runs(entry: GatheredEntry) -> list[tuple[str, int, int, int]]:
    return [(run.session.name, run.sequence_id, run.messages, run.index) for run in entry.runs]


def test_groups_of_one_turn_share_an_entry_and_contiguous_ones_a_run() -> None:
    coalescer = Coalescer(1 << 20)
    a, b = session("a"), session("b")
    add(coalescer, a, groups(0, 3))
    add(coalescer, a, groups(3, 2))
    add(coalescer, b, groups(7, 1))
    add(coalescer, a, groups(5, 1))
    assert coalescer.queued_bytes > 0
    entry = coalescer.take()
    assert not coalescer
    assert coalescer.queued_bytes == 0
    assert runs(entry) == [("a", 0, 5, 0), ("b", 7, 1, 5), ("a", 5, 1, 6)]
    assert (a.outstanding, b.outstanding) == (2, 1)
    decoded = Entry(entry.encode(40, 99))
    assert (decoded.message_count, decoded.first_index, decoded.append_time_ms) == (7, 40, 99)
    assert [decoded.producer_names[number] for number in decoded.producers] == list("aaaaaba")


def test_gaps_in_sequence_ids_end_a_run() -> None:
    coalescer = Coalescer(1 << 20)
    a = session("a")
    batches = [encode_batch([b"x"], sequence_id=n, publish_time_ms=0) for n in range(4)]
    add(coalescer, a, AdmittedGroups(batches, [1, 2, 1, 1], [0, 1, 3, 10]))
    assert runs(coalescer.take()) == [("a", 0, 4, 0), ("a", 10, 1, 4)]


def test_entries_are_capped_and_one_group_is_never_divided() -> None:
    coalescer = Coalescer(1000)
    a = session()
    add(coalescer, a, groups(0, 100))
    add(coalescer, a, groups(100, 100), whole=True)
    sizes, found = [], list[tuple[str, int, int, int]]()
    while coalescer:
        entry = coalescer.take()
        sizes.append(entry.size)
        found += runs(entry)
    assert all(size <= 1000 for size in sizes[:-1])
    assert found[-1][1:3] == (100, 100)
    assert sum(count for _, _, count, _ in found) == 200
    assert [sequence_id for _, sequence_id, _, _ in found] == sorted(run[1] for run in found)
    assert a.outstanding == len(found)
    assert coalescer.queued_bytes == 0


def test_the_bounds_of_an_entry_hold() -> None:
    coalescer = Coalescer(1 << 40)
    a = session()
    add(coalescer, a, groups(0, MAX_MESSAGES_PER_BATCH - 1, 0))
    add(coalescer, a, groups(MAX_MESSAGES_PER_BATCH - 1, 2, 0))
    assert len(coalescer.take().batches) == MAX_MESSAGES_PER_BATCH - 1
    most = MAX_MESSAGES_PER_BATCH
    add(coalescer, a, AdmittedGroups([b"x" * 60, b"x" * 60], [most, 1], [0, most]))
    coalescer.take()
    assert [entry.messages for entry in coalescer.clear()] == [most, 1]


def test_many_producer_names_fit_the_header() -> None:
    coalescer = Coalescer(1 << 40)
    for number in range(1000):
        add(coalescer, session(f"{number:0255}"), groups(0, 1))
    count = 0
    while coalescer:
        entry = coalescer.take()
        count += len(entry.batches)
        Entry(entry.encode(0, 0))
    assert count == 1000
