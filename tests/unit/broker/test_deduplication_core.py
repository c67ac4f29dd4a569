"""The decision of deduplication: text scenarios, and a naive model that keeps all ids."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from magnetar.broker.topics.core.deduplication import KnownProducers, Pushed, is_duplicate
from magnetar.proto.batch_extensions import Chunk
from magnetar.proto.errors import DataDirectoryError, SequenceIdError
from support import text_scenarios

HOUR_MS = 3_600_000


@dataclass
class Group:
    name: str
    first: int
    last: int
    chunk: Chunk | None = None

    def __str__(self) -> str:
        ids = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        if self.chunk is None:
            return f"{self.name} {ids}"
        end = " last" if self.chunk.last else ""
        return f"{self.name} {ids} chunk {self.chunk.chunk_id.decode()} {self.chunk.index}{end}"


@dataclass
class Topic:
    """The cores as a topic uses them: sessions, a queue of what is outstanding, a log."""

    ttl_ms: int = HOUR_MS
    max_producers: int = 3
    now_ms: int = 0
    sessions: dict[str, Pushed] = field(default_factory=dict)
    outstanding: list[Group] = field(default_factory=list)
    log: list[tuple[int, Group]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = KnownProducers(self.ttl_ms, self.max_producers, self.sessions.__contains__)

    def send(self, group: Group) -> bool:
        stored = self.sessions[group.name].take(group.first, group.last, group.chunk)
        if stored:
            self.outstanding.append(group)
        return stored

    def confirm(self, count: int) -> None:
        for group in self.outstanding[:count]:
            self.known.stored(group.name, group.last, group.chunk, self.now_ms)
            self.log.append((self.now_ms, group))
        del self.outstanding[:count]

    def fail(self) -> None:
        """The topic is loaded anew: nothing that was outstanding is stored."""
        self.outstanding.clear()
        self.sessions.clear()

    def reload(self, pieces: list[bytes], behind: int) -> None:
        """By another broker, with pieces of a state that described the log up to `behind` entries before its end."""
        self.fail()
        self.known.clear()
        for piece in pieces:
            self.known.apply(piece)
        for at_ms, group in self.log[len(self.log) - behind :]:
            self.known.stored(group.name, group.last, group.chunk, at_ms)


def parse(words: list[str]) -> Group:
    name, ids, *rest = words
    first, _, last = ids.partition("-")
    chunk = None
    if rest:
        _, chunk_id, index, *end = rest
        chunk = Chunk(chunk_id.encode(), int(index), end == ["last"])
    return Group(name, int(first), int(last or first), chunk)


def run_scenario(text: str) -> str:
    topic = Topic()
    pieces: list[bytes] = []
    described = 0

    def answer(command: str) -> list[str]:
        nonlocal described
        verb, *words = command.split()
        match verb:
            case "open":
                pushed = topic.sessions[words[0]] = topic.known.begin(words[0])
                partial = pushed.partial
                more = (
                    "" if partial is None else f", chunk {partial.following} of {partial.sequence_id} is next"
                )
                return [f"last {pushed.last}{more}"]
            case "close":
                del topic.sessions[words[0]]
            case "send":
                try:
                    return ["stored" if topic.send(parse(words)) else "duplicate"]
                except SequenceIdError as error:
                    return [f"SequenceIdError: {error.message}"]
            case "confirm":
                topic.confirm(int(words[0]))
            case "fail":
                topic.fail()
            case "wait":
                topic.now_ms += int(words[0]) * 60_000
                topic.known.forget(topic.now_ms)
            case "snapshot":
                pieces[:] = topic.known.pieces()
                described = len(topic.log)
            case "reload":
                topic.reload(pieces, len(topic.log) - described)
        return [
            ", ".join(f"{name} {topic.known.begin(name).last}" for name in sorted(topic.known._known))
            or "nobody is known"
        ]

    return text_scenarios.play(text, answer)


@pytest.mark.parametrize("path", text_scenarios.scenario_files("deduplication"), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    text_scenarios.check(path, run_scenario)


@given(st.integers(-1, 9), st.integers(0, 9), st.integers(0, 3))
def test_a_group_is_new_or_stored_or_both(pushed: int, first: int, more: int) -> None:
    stored = {number <= pushed for number in range(first, first + more + 1)}
    if len(stored) == 2:
        with pytest.raises(SequenceIdError):
            is_duplicate(pushed, first, first + more)
    else:
        assert is_duplicate(pushed, first, first + more) == (stored == {True})


NAMES = st.sampled_from("pqr")


class Machine(RuleBasedStateMachine):
    """Producers that send their messages in order and again after any failure; topics that fail, move and forget nobody.

    The naive model is the log: each message of a producer is there once, in order, when it was receipted.
    """

    @initialize()
    def begin(self) -> None:
        self.topic = Topic()
        self.following: dict[str, int] = {}  # message that the producer sends next
        self.receipted: dict[str, int] = {}  # messages up to here
        self.pieces: list[bytes] = []
        self.described = 0
        self.owed: list[tuple[int, Group]] = []  # receipts of duplicates, and how many groups they wait for

    def messages(self, name: str, number: int) -> list[Group]:
        """What message `number` of a producer is sent as: every fourth one in three chunks, others as groups of two ids."""
        if number % 4:
            return [Group(name, 2 * number, 2 * number + 1)]
        chunk_id = f"{number:08d}".encode()
        return [Group(name, 2 * number, 2 * number, Chunk(chunk_id, index, index == 2)) for index in range(3)]

    def _settle(self) -> None:
        for _, group in self.topic.log:
            if group.chunk is None or group.chunk.last:
                self.receipted[group.name] = max(self.receipted.get(group.name, -1), group.last // 2)

    @rule(name=NAMES)
    def open(self, name: str) -> None:
        if name not in self.topic.sessions and not any(
            group.name == name for group in self.topic.outstanding
        ):
            self.topic.sessions[name] = self.topic.known.begin(name)
            self.following[name] = self.receipted.get(name, -1) + 1

    @rule(name=NAMES, parts=st.integers(1, 3))
    def send(self, name: str, parts: int) -> None:
        if name in self.topic.sessions:
            number = self.following[name]
            for group in self.messages(name, number):
                if self.topic.send(group):
                    continue
                ids = [one for _, one in self.topic.log if one == group] + [
                    one for one in self.topic.outstanding if one == group
                ]
                assert len(ids) == 1, "a duplicate of something that is neither stored nor on its way"
            self.following[name] = number + 1

    @rule(name=NAMES, parts=st.integers(1, 2))
    def send_some_chunks_and_die(self, name: str, parts: int) -> None:
        if name in self.topic.sessions and self.following[name] % 4 == 0:
            for group in self.messages(name, self.following[name])[:parts]:
                self.topic.send(group)
            del self.topic.sessions[name]

    @rule(name=NAMES)
    def connection_breaks(self, name: str) -> None:
        self.topic.sessions.pop(name, None)

    @rule(count=st.integers(1, 5))
    def confirm(self, count: int) -> None:
        self.topic.confirm(count)
        self._settle()

    @rule()
    def receipts_are_lost(self) -> None:
        """The producers do not know what is stored: they send from an earlier message on."""
        for name in self.receipted:
            self.receipted[name] = -1

    @rule()
    def fail(self) -> None:
        self.topic.fail()

    @rule()
    def snapshot(self) -> None:
        self.pieces = list(self.topic.known.pieces())
        list(self.topic.known.changes())
        self.described = len(self.topic.log)

    @precondition(lambda self: self.pieces)
    @rule()
    def change(self) -> None:
        self.pieces += self.topic.known.changes()
        self.described = len(self.topic.log)

    @rule(more=st.integers(0, 2))
    def hand_over(self, more: int) -> None:
        """Entries that pieces have already may be replayed all the same."""
        behind = min(len(self.topic.log) - self.described + more, len(self.topic.log))
        self.topic.reload(self.pieces, behind)

    @invariant()
    def each_message_is_stored_once_in_order(self) -> None:
        for name in "pqr":
            found = [
                (group.last, -1 if group.chunk is None else group.chunk.index)
                for _, group in self.topic.log
                if group.name == name
            ]
            assert found == sorted(set(found))


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


def test_memory_and_forgetting_by_number() -> None:
    connected = {"p0"}
    known = KnownProducers(HOUR_MS, 100, connected.__contains__)
    for number in range(1_000):
        known.stored(f"p{number}", number, None, number)
        assert len(known._known) <= 100
    assert known.begin("p0").last == 0
    assert known.begin("p999").last == 999
    assert known.begin("p500").last == -1


def test_names_that_are_connected_are_not_looked_through_for_each_new_one() -> None:
    looks, there = 0, True

    def connected(name: str) -> bool:
        nonlocal looks
        looks += 1
        return there

    known = KnownProducers(HOUR_MS, 160, connected)
    for number in range(1_600):
        known.stored(f"p{number}", number, None, number)
    assert len(known._known) == 1_600
    assert looks < 1_600 * 160
    there = False
    for number in range(1_600, 1_611):
        known.stored(f"p{number}", number, None, number)
    assert len(known._known) <= 160


def test_by_age_but_never_while_it_is_connected() -> None:
    connected = {"p"}
    known = KnownProducers(HOUR_MS, 100, connected.__contains__)
    known.stored("p", 1, None, 0)
    known.stored("q", 1, None, 0)
    known.forget(HOUR_MS)
    assert len(known._known) == 2
    known.forget(HOUR_MS + 1)
    assert [known.begin(name).last for name in "pq"] == [1, -1]
    connected.clear()
    known.forget(HOUR_MS + 1)
    assert not len(known._known)


def test_many_producers_are_several_pieces_and_damage_is_said() -> None:
    known, copy = (
        KnownProducers(HOUR_MS, 10_000, "".__contains__),
        KnownProducers(HOUR_MS, 10_000, "".__contains__),
    )
    for number in range(2_500):
        known.stored(f"p{number}", number, None, 5)
    pieces = list(known.pieces())
    assert len(pieces) == len(list(known.changes())) == 3
    assert not list(known.changes())
    assert sum(map(copy.apply, pieces)) == 2_500
    assert copy.begin("p2499").last == 2_499
    with pytest.raises(DataDirectoryError):
        copy.apply(pieces[0][:-1])
