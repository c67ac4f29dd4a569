"""Rings of non-persistent topics against a model: what they hold, what leaves, in which order, within which bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.cursors.core.acks import Position
from magnetar.broker.log.ledger_list import LedgerList
from magnetar.broker.log.records import LedgerInfo
from magnetar.broker.log.ring import Ring, Rings
from magnetar.proto.batch import encode_batch
from magnetar.proto.entry import encode_entry
from magnetar.proto.ids import TopicName
from support.memory_metadata import MemoryMetadataStore

SMALL, LARGE = 100, 6_000  # bytes of a value; a segment is left at 500 or 1,000


class World:
    """Some rings of one broker; a clock that may go back."""

    def __init__(self, limits: list[int], limit: int) -> None:
        self.rings = Rings(limit)
        self.now_ms = 1_000
        self.ids: list[int] = []  # in the order in which entries were appended
        self.kept: list[list[tuple[int, int, int]]] = [[] for _ in limits]  # segment, entry, number
        self.all = [self._ring(number, limit) for number, limit in enumerate(limits)]
        self.appended = 0

    def _ring(self, number: int, limit: int) -> tuple[Ring[int], LedgerList]:
        ledgers = LedgerList(TopicName.parse(f"non-persistent://a/b/{number}"), MemoryMetadataStore())
        kept = self.kept[number]

        def confirmed(segment: int, entry: int, data: bytes | None, context: int) -> None:
            assert data is None
            kept.append((segment, entry, context))

        def leaving(info: LedgerInfo, end: Position) -> None:
            assert kept[: info.entries] == [(info.ledger_id, at, kept[at][2]) for at in range(info.entries)]
            assert info.entries
            assert end[1:] == (0, 0)
            assert all(ring.get((info.ledger_id, at)) for at in range(info.entries)), (
                "gone before it was said"
            )
            del kept[: info.entries]

        ring = Ring(ledgers, self.rings, limit, confirmed, leaving)
        ring.begin(self.now_ms)
        return ring, ledgers

    def append(self, number: int, size: int, messages: int) -> None:
        ring, ledgers = self.all[number]
        batch = encode_batch([bytes(size)] * messages, sequence_id=0, publish_time_ms=0)
        entry = encode_entry([batch], [messages], [0], ["p"], first_index=ring.next_message, append_time_ms=0)
        before = ledgers.message_count
        self.appended += 1
        ring.append(entry, messages, self.now_ms, self.appended)
        assert ledgers.message_count == before + messages

    def check(self) -> None:
        for (ring, ledgers), kept in zip(self.all, self.kept):
            ring.check()
            keys = [(segment, entry) for segment, entry, _ in kept]
            assert keys == sorted(keys)
            assert keys == list(ring._entries)
            assert [number for *_, number in kept] == sorted(number for *_, number in kept)
            for key in keys:
                entry = ring.get(key)
                assert entry is not None
                assert ledgers.is_confirmed(*key)
                info = ledgers.info(key[0])
                assert info is not None
                assert entry.first_index + entry.message_count <= info.messages
        assert self.rings.used == sum(ring.used for ring, _ in self.all)
        filled = [ring for ring, _ in self.all if ring.used]
        segments = {key[0] for ring in filled for key in ring._entries}
        assert self.rings.used <= self.rings.limit or len(segments) == 1


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from([SMALL, SMALL, LARGE]), st.integers(1, 3), st.integers(-5, 5)
    ),
    max_size=60,
)


@given(STEPS, st.sampled_from([8_000, 20_000, 100_000]))
def test_what_is_newest_is_kept_in_order_within_the_bounds(
    steps: list[tuple[int, int, int, int]], limit: int
) -> None:
    world = World([8_000, 8_000, 16_000], limit)
    for number, size, messages, later_ms in steps:
        world.now_ms += later_ms
        world.append(number, size, messages)
        world.check()
        assert world.kept[number][-1][2] == world.appended, "what was appended just now is not there"
    ids = [info.ledger_id for _, ledgers in world.all for info in ledgers.ledgers]
    assert len(set(ids)) == len(ids), "two segments of a broker have one id"
    for ring, ledgers in world.all:
        ring.close()
        assert not ledgers.ledgers
        assert not ring.used
    assert not world.rings.used
    assert not world.rings._closed
    assert not world.rings._open


def test_a_topic_that_floods_leaves_what_others_have_just_appended() -> None:
    world = World([16_000, 16_000], 20_000)
    world.append(0, SMALL, 1)
    for number in range(200):
        world.append(1, SMALL, 3)
        if number == 100:
            world.append(0, SMALL, 1)
        world.check()
    assert [number for *_, number in world.kept[0]] == [1, 103]


def test_of_open_segments_that_one_leaves_to_which_nothing_was_appended_for_longest() -> None:
    world = World([160_000] * 3, 6_000)
    for number in (0, 1, 2, 0, 1, 0):
        world.append(number, SMALL, 1)
    for _ in range(4):  # no segment is full; 0 was first, and has something new
        world.append(0, 2 * SMALL, 3)
        world.check()
    assert [len(kept) for kept in world.kept] == [7, 0, 0]


def test_ids_rise_from_load_to_load_and_are_exact_in_json() -> None:
    first, second = Rings(1000), Rings(1000)
    before = [first.next_id(1_800_000_000_000, 0) for _ in range(300)]
    assert before == sorted(set(before))
    assert second.next_id(1_800_000_000_002, 0) > before[-1]
    assert first.next_id(0, 0) > before[-1], "a clock that goes back takes no id back"
    assert Rings(1000).next_id(0, before[-1]) == before[-1] + 1, (
        "of the topic's next owner, whose clock is behind"
    )
    assert before[-1] < 1 << 53


def test_many_topics_with_little_each_stay_within_the_bound_of_all() -> None:
    world = World([160_000] * 50, 20_000)
    for turn in range(100):
        world.append(turn % 50, SMALL, 1)
    world.check()
    newest = [kept[-1][2] for kept in world.kept if kept]
    assert max(newest) == 100
    assert len(newest) < 50
    assert min(newest) > 100 - len(newest)
