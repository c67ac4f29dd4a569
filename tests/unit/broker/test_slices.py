"""How an entry is cut for one delivery."""

from typing import NamedTuple

import pytest

from magnetar.broker.dispatch.core import slices
from magnetar.proto.batch import encode_batch
from magnetar.proto.entry import Entry, encode_entry

UNLIMITED = 1 << 60


class Cut(NamedTuple):
    """What is cut from an entry, by name."""

    first_batch: int
    last_batch: int
    wanted: list[tuple[int, int]]
    messages: int
    size: int
    next_index: int


def cut(entry: Entry, wanted: list[tuple[int, int]], max_messages: int, max_bytes: int) -> Cut:
    return Cut(*slices.cut(entry, wanted, max_messages, max_bytes))


def make_entry(counts: list[int], value: bytes = b"v") -> Entry:
    batches = [encode_batch([value] * n, sequence_id=0, publish_time_ms=0) for n in counts]
    return Entry(encode_entry(batches, counts, [0] * len(counts), ["p"], first_index=0, append_time_ms=0))


def check(entry: Entry, wanted: list[tuple[int, int]], piece: Cut) -> None:
    """Every wanted message of the batches cut is in `wanted`, whole batches only, and nothing is left out before it."""
    first = entry.batch_start_index(piece.first_batch)
    assert piece.wanted[0][0] == wanted[0][0]
    covered = {n for a, b in piece.wanted for n in range(a, b + 1)}
    assert covered == {n for a, b in wanted for n in range(a, b + 1) if n < piece.next_index}
    assert first <= min(covered)
    assert max(covered) < piece.next_index == entry.end_indexes[piece.last_batch - 1]
    assert piece.messages == len(covered)


def test_a_whole_entry() -> None:
    entry = make_entry([1] * 10)
    assert cut(entry, [(0, 9)], 100, UNLIMITED)[:4] == (0, 10, [(0, 9)], 10)


@pytest.mark.parametrize("permits", [1, 3, 4, 9, 10, 11])
@pytest.mark.parametrize(
    "wanted", [[(0, 11)], [(2, 3), (5, 11)], [(1, 1), (11, 11)], [(4, 4), (6, 6), (8, 8)]]
)
def test_permits_overshoot_by_one_batch_at_most(permits: int, wanted: list[tuple[int, int]]) -> None:
    entry = make_entry([4, 1, 3, 2, 2])
    piece = cut(entry, wanted, permits, UNLIMITED)
    check(entry, wanted, piece)
    assert piece.messages < permits + 4


def test_bytes_overshoot_by_one_batch() -> None:
    entry = make_entry([1] * 10, b"x" * 100)
    size = len(entry.batch(0))
    assert cut(entry, [(0, 9)], 100, 1).last_batch == 1
    assert cut(entry, [(0, 9)], 100, 2 * size).last_batch == 2
    assert cut(entry, [(0, 9)], 100, 2 * size + 1).last_batch == 3
    assert cut(entry, [(5, 9)], 100, 2 * size)[:2] == (5, 7)


def test_gaps_go_along_and_cost_neither_permits_nor_bytes() -> None:
    entry = make_entry([1] * 10, b"x" * 3000)
    size = len(entry.batch(0))
    assert cut(entry, [(0, 1), (4, 9)], 100, UNLIMITED)[:5] == (0, 10, [(0, 1), (4, 9)], 8, 8 * size)
    assert cut(entry, [(0, 1), (4, 9)], 3, UNLIMITED)[:4] == (0, 5, [(0, 1), (4, 4)], 3)
    assert cut(entry, [(0, 1), (4, 9)], 100, 2 * size)[:4] == (0, 2, [(0, 1)], 2)


def test_every_wanted_message_comes_exactly_once() -> None:
    entry = make_entry([4, 1, 3, 2, 2, 5, 1, 1, 6], b"x" * 300)
    for permits in range(1, 12):
        for limit in (1, 700, 5000, UNLIMITED):
            wanted, seen = [(1, 2), (4, 9), (11, 11), (13, 24)], list[int]()
            while wanted:
                piece = cut(entry, wanted, permits, limit)
                check(entry, wanted, piece)
                seen += [n for a, b in piece.wanted for n in range(a, b + 1)]
                wanted = [(max(a, piece.next_index), b) for a, b in wanted if b >= piece.next_index]
            assert seen == [1, 2, *range(4, 10), 11, *range(13, 25)]
