"""The protocol against an adversary: bookies, network and store in one loop of random steps, invariants at the end.

One writer, up to two recoveries at any moment, bookies that lose their connection to one of them, answers that get lost
after the entry was stored, races for the metadata. No disk is lost, so nothing confirmed may be, ever:

* every confirmed entry is in the closed ledger, with its bytes, on at least Qa bookies of its ensemble (no truncation);
* entries are confirmed in order; nothing is confirmed after another owner fenced and closed past it;
* everybody who closed the ledger got the same result.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from magnetar.ledger.core import recovery
from magnetar.ledger.core.events import (
    AddFailed,
    AddStored,
    BookiesChosen,
    BookieSlow,
    ChooseBookies,
    CloseRequested,
    Confirm,
    Event,
    Failed,
    Finished,
    Instruction,
    LastConfirmedRead,
    MetadataFound,
    MetadataWritten,
    NoBookies,
    ReadEntries,
    ReadLastConfirmed,
    ReadMetadata,
    SendAdds,
    WriteMetadata,
)
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryCore
from magnetar.ledger.core.writer import WriterCore
from magnetar.proto.errors import ConnectionLost, EntryNotFound, LedgerFenced, LedgerNotFound
from magnetar.proto.ledger_entry import decode_ledger_entry_header, verify_ledger_entry
from support.ledger_scenario import entry_read

LEDGER = 3
SHAPES = [(1, 1, 1), (2, 2, 1), (2, 2, 2), (3, 2, 2), (3, 3, 2), (4, 3, 2), (3, 2, 1)]
SEEDS = 100


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads ahead of the end multiply steps and show nothing new."""
    monkeypatch.setattr(recovery, "WINDOW_ENTRIES", 16)
    monkeypatch.setattr(recovery, "RUN_ENTRIES", 4)


class SimulatedBookie:
    def __init__(self) -> None:
        self.entries: dict[int, bytes] = {}
        self.fenced = False
        self.lac = -1

    def add(self, entry: bytes, recovery: bool) -> int:
        header = verify_ledger_entry(entry)
        if self.fenced and not recovery:
            return LedgerFenced.code
        self.entries[header.entry_id] = entry
        self.lac = max(self.lac, header.last_add_confirmed)
        return 0


class World:
    """Everything but the cores; steps happen in random order."""

    def __init__(self, seed: int, shape: tuple[int, int, int]) -> None:
        self.rng = random.Random(seed)
        self.bookies = {f"b{n}": SimulatedBookie() for n in range(shape[0] + 2)}
        names = self.rng.sample(sorted(self.bookies), shape[0])
        self.metadata = LedgerMetadata.create(Striping(*shape), tuple(names), 0, {})
        self.version = 0
        self.steps: list[Callable[[], None]] = []
        self.confirmed: list[int] = []
        self.results: list[LedgerMetadata] = []
        self.fenced_writer = False

    def run(self) -> None:
        """Steps in random order until none is left."""
        while self.steps:
            # Mostly old steps first, so that there is progress; now and then the youngest.
            at = self.rng.randrange(min(len(self.steps), 6)) if self.rng.random() < 0.9 else -1
            self.steps.pop(at)()

    def later(self, step: Callable[[], None]) -> None:
        self.steps.append(step)


class Party:
    """A writer or a recovery, with a connection of its own to each bookie."""

    def __init__(self, world: World, core: WriterCore | RecoveryCore) -> None:
        self.world = world
        self.core = core
        self.lost: set[str] = set()  # bookies it cannot reach
        # Bookies whose adds and answers take long.
        self.slow = {name for name in sorted(world.bookies) if world.rng.random() < 0.25}
        self.dead = False  # the process is gone
        self.ended = False

    @property
    def recovery(self) -> bool:
        return isinstance(self.core, RecoveryCore)

    def tell(self, event: Event) -> None:
        if not self.dead and not self.ended:
            self.carry_out(self.core.handle(event))
            self.core.check()

    def carry_out(self, instructions: list[Instruction]) -> None:
        queue = list(instructions)
        while queue:
            instruction = queue.pop(0)
            match instruction:
                case SendAdds(bookie, adds):
                    for entry_id, entry in adds:
                        self.send(bookie, entry_id, entry)
                case Confirm(first, adds, None):
                    self.world.confirmed += range(first, first + len(adds))
                case ChooseBookies() as ask:
                    queue += self.core.handle(self.choose(ask))
                case WriteMetadata(metadata, version):
                    self.world.later(lambda m=metadata, v=version: self.write(m, v))  # type: ignore[misc]
                case ReadMetadata():
                    self.world.later(
                        lambda: self.tell(MetadataFound(self.world.metadata, self.world.version))
                    )
                case ReadLastConfirmed(bookie):
                    self.delayed(bookie, lambda b=bookie: self.read_last_confirmed(b))  # type: ignore[misc]
                case ReadEntries(bookie, first, last, stripe):
                    for entry_id in stripe.ids(first, last):
                        self.delayed(bookie, lambda b=bookie, e=entry_id: self.read(b, e))  # type: ignore[misc]
                case Finished(metadata):
                    self.ended = True
                    self.world.results.append(metadata)
                case Failed():
                    self.ended = True
                case _:
                    pass

    def choose(self, ask: ChooseBookies) -> BookiesChosen | NoBookies:
        spare = [name for name in sorted(self.world.bookies) if name not in ask.exclude]
        if len(spare) < len(ask.positions):
            return NoBookies("none")
        chosen = self.world.rng.sample(spare, len(ask.positions))
        return BookiesChosen(dict(zip(ask.positions, chosen)))

    def reach(self, bookie: str) -> bool:
        """Whether the connection holds; now and then it breaks for good."""
        if self.world.rng.random() < 0.02:
            self.lost.add(bookie)
        return bookie not in self.lost

    def send(self, bookie: str, entry_id: int, entry: bytes) -> None:
        self.delayed(bookie, lambda: self.add(bookie, entry_id, entry))

    def delayed(self, bookie: str, step: Callable[[], None]) -> None:
        wait(self.world, self.world.rng.randint(0, 60) if bookie in self.slow else 0, step)

    def add(self, bookie: str, entry_id: int, entry: bytes) -> None:
        code = ConnectionLost.code
        # What was sent before the connection broke, or the process died, may arrive all the same.
        if self.reach(bookie) or self.world.rng.random() < 0.5:
            stored = self.world.bookies[bookie].add(entry, self.recovery)
            code = stored if bookie not in self.lost else ConnectionLost.code
        self.world.later(lambda: self.added(bookie, entry_id, code))

    def added(self, bookie: str, entry_id: int, code: int) -> None:
        if code:
            self.tell(AddFailed(bookie, entry_id, code))
        elif isinstance(self.core, RecoveryCore):
            self.tell(AddStored(bookie, entry_id))
        elif not self.dead:
            confirmed = self.core.stored(bookie, entry_id)
            last = self.core.last_add_confirmed
            self.world.confirmed += range(last + 1 - len(confirmed), last + 1)
            self.carry_out(self.core.drained())
            self.core.check()

    def write(self, metadata: LedgerMetadata, version: int) -> None:
        world = self.world
        if world.version == version:
            world.metadata, world.version = metadata, version + 1
            if world.rng.random() < 0.95:
                answer: Event = MetadataWritten(world.version)
            else:
                answer = MetadataFound(
                    metadata, world.version
                )  # the answer was lost; the store was asked again
        else:
            answer = MetadataFound(world.metadata, world.version)
        world.later(lambda: self.tell(answer))

    def read_last_confirmed(self, name: str) -> None:
        bookie = self.world.bookies[name]
        code = 0
        if not self.reach(name):
            code = ConnectionLost.code
        elif not bookie.entries and not bookie.fenced:
            code = LedgerNotFound.code
        if code != ConnectionLost.code:
            bookie.fenced = True
        lac = bookie.lac if code == 0 else -1
        self.world.later(lambda: self.tell(LastConfirmedRead(name, lac, code)))

    def read(self, name: str, entry_id: int) -> None:
        if self.world.rng.random() < 0.05:
            self.tell(BookieSlow(name))
        bookie = self.world.bookies[name]
        event = entry_read(name, entry_id, b"", 0, ConnectionLost.code)
        if self.reach(name):
            bookie.fenced = True
            entry = bookie.entries.get(entry_id)
            if entry is None:
                event = entry_read(name, entry_id, b"", 0, EntryNotFound.code)
            else:
                event = entry_read(name, entry_id, entry, decode_ledger_entry_header(entry).length, 0)
        self.world.later(lambda: self.tell(event))


def play(seed: int, shape: tuple[int, int, int]) -> World:
    world = World(seed, shape)
    rng = world.rng
    core = WriterCore(LEDGER, world.metadata, 0)
    writer = Party(world, core)

    def append(left: int) -> None:
        if writer.dead or writer.ended:
            return
        for _ in range(rng.randint(1, 3)):
            if core.refusal() is None:
                entry, bookies = core.append(b"%d" % (core.last_add_pushed + 1), None)
                for bookie in bookies:
                    writer.send(bookie, core.last_add_pushed, entry)
        if left:
            world.later(lambda: append(left - 1))
        elif rng.random() < 0.7:
            writer.tell(CloseRequested())

    def recover() -> None:
        party = Party(world, RecoveryCore(LEDGER, world.metadata, world.version))
        if rng.random() < 0.3:
            world.later(lambda: setattr(party, "dead", True))  # crashes on the way
        assert isinstance(party.core, RecoveryCore)
        party.carry_out(party.core.begin())

    world.later(lambda: append(rng.randint(0, 15)))
    for _ in range(rng.randint(0, 2)):
        delay = rng.randint(0, 150)
        world.later(lambda d=delay: wait(world, d, recover))  # type: ignore[misc]
    if rng.random() < 0.3:
        delay = rng.randint(0, 150)
        world.later(lambda: wait(world, delay, lambda: setattr(writer, "dead", True)))
    world.run()
    # After all faults somebody recovers the ledger with every bookie in reach, whatever state it is in.
    for _ in range(2):
        last = Party(world, RecoveryCore(LEDGER, world.metadata, world.version))
        last.reach = lambda bookie: True  # type: ignore[method-assign]
        last.carry_out(last.core.begin())  # type: ignore[union-attr]
    world.run()
    return world


def wait(world: World, steps: int, action: Callable[[], None]) -> None:
    """Lets so many other steps happen first."""
    world.later((lambda: wait(world, steps - 1, action)) if steps else action)


def judge(world: World) -> None:
    metadata = world.metadata
    assert metadata.closed, "with every bookie in reach a recovery ends"
    assert world.confirmed == list(range(len(world.confirmed))), "confirmed in order, each once"
    assert len(world.confirmed) <= metadata.last_entry + 1, "truncated"
    ends = {(result.last_entry, result.length, result.ensembles) for result in world.results}
    assert ends == {(metadata.last_entry, metadata.length, metadata.ensembles)}, "two ends of one ledger"
    length = 0
    for entry_id in range(metadata.last_entry + 1):
        bookies = metadata.ensemble_of(entry_id).bookies
        copies = [
            world.bookies[bookies[position]].entries[entry_id]
            for position in metadata.striping.write_set(entry_id)
            if entry_id in world.bookies[bookies[position]].entries
        ]
        assert len(copies) >= metadata.ack_quorum, f"entry {entry_id} is on {len(copies)} bookies"
        assert len(set(copies)) == 1, "replicas differ"
        length += len(b"%d" % entry_id)
    assert length == metadata.length


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "/".join(map(str, shape)))
def test_nothing_confirmed_is_lost(shape: tuple[int, int, int]) -> None:
    confirmed = changed = fenced = 0
    for seed in range(SEEDS):
        try:
            world = play(seed, shape)
            judge(world)
        except AssertionError as error:
            raise AssertionError(f"play({seed}, {shape}): {error}") from error
        confirmed += len(world.confirmed)
        changed += len(world.metadata.ensembles) > 1
        fenced += world.metadata.last_entry >= len(world.confirmed)
    assert confirmed > 5 * SEEDS, "the run had a load"
    assert changed >= SEEDS // 20, "ensembles changed"
    assert fenced >= SEEDS // 20, "recoveries found unconfirmed entries"
