"""A writer, its resurrection and racing recoveries, each cut off from bookies of its own, over a store that loses answers.

The whole client over bookies in memory, in turns of the loop, by seed: hundreds of small plays in a few seconds. (tests/sim
plays the same with real bookies, sockets and crashes.) At the end all is healed, and:

* every confirmed entry is in the closed ledger, with its bytes, on Qa bookies at least, and all copies are equal;
* whoever closed or recovered the ledger got the same end; confirmed entries came in order, each once.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.ledger import LedgerClient, LedgerSettings, LocalTransport, StaticBookies
from magnetar.ledger.core import recovery
from magnetar.ledger.core.metadata import LedgerMetadata, LedgerState
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.metadata.store import Versioned
from magnetar.proto.errors import (
    BookieUnavailable,
    ConnectionLost,
    MagnetarError,
    RequestTimeout,
    TooManyRequests,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, decode_ledger_entry_header
from support.answering import Answering
from support.bookies import Bookies, Confirmations, Done, FakeBookie
from support.memory_metadata import MemoryMetadataStore

SETTINGS = LedgerSettings(explicit_lac_interval_s=0.001, speculative_read_s=0.002, suspect_bookie_s=0.01)
SHAPES = [(1, 1, 1), (2, 2, 1), (3, 3, 2), (3, 2, 2), (4, 3, 2)]
SEEDS = 40


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class LossyStore(MemoryMetadataStore):
    """Takes turns; some answers are lost, of writes that were applied, will be applied later, or never."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.loss = 0.0
        self.lost = 0
        self.late: list[asyncio.Task[None]] = []
        self.written: list[LedgerMetadata] = []
        self._hold: asyncio.Event | None = None

    def hold_next_close(self, until: asyncio.Event) -> None:
        """The next write that closes a ledger waits."""
        self._hold = until

    @property
    def holds_next_close(self) -> bool:
        """No such write came yet."""
        return self._hold is not None

    async def get(self, path: str) -> Versioned | None:
        await turns(self.rng.randint(0, 3))
        self._lose(1)
        return await super().get(path)

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        await turns(self.rng.randint(0, 3))
        metadata = LedgerMetadata.decode(value, 0)
        if self._hold is not None and metadata.closed:
            held, self._hold = self._hold, None
            await held.wait()
        fate = self.rng.random()
        if self.loss and fate < 0.3:
            self._lose(2)
        if self.loss and fate < 0.4:
            self.late.append(asyncio.create_task(self._write_late(path, value, version)))
            raise RequestTimeout("silent")
        written = await super().put(path, value, version=version)
        self.written.append(metadata)
        if fate > 0.7:
            self._lose(2)
        return written

    async def _write_late(self, path: str, value: bytes, version: int) -> None:
        await turns(self.rng.randint(5, 60))
        try:
            await super().put(path, value, version=version)
        except MagnetarError:
            return
        self.written.append(LedgerMetadata.decode(value, 0))

    def _lose(self, times: int) -> None:
        if self.rng.random() < self.loss * times:
            self.lost += 1
            raise RequestTimeout("the answer was lost")


class Reached(Answering):
    """A bookie as one client reaches it: not at all, or one way only, for a while."""

    def __init__(self, bookie: FakeBookie, rng: random.Random) -> None:
        self._bookie = bookie
        self._rng = rng
        self.cut = ""  # "requests" or "answers" get lost, or it is "busy": takes no adds
        self.accepting = True
        self.on_accepting: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bookie, name)

    def add(self, entry: bytes, *, recovery: bool, done: Done, deferred: bool = False) -> None:
        """Answers come after some turns, and an error where the way is cut."""
        loop = asyncio.get_running_loop()
        header = decode_ledger_entry_header(entry)
        ledger_id, entry_id = header.ledger_id, header.entry_id
        if self.cut == "requests":
            loop.call_soon(done, ledger_id, entry_id, BookieUnavailable.code)
            return
        if self.cut == "busy":
            loop.call_soon(done, ledger_id, entry_id, TooManyRequests.code)
            return
        if self.cut == "answers":
            self._bookie.add(entry, recovery=recovery, done=lambda *_: None)
            loop.call_soon(done, ledger_id, entry_id, ConnectionLost.code)
            return
        self._bookie.add(entry, recovery=recovery, done=done)

    async def read(self, *arguments: Any, **named: Any) -> Any:
        await self._way()
        return await self._bookie.read(*arguments, **named)

    async def read_last_confirmed(self, *arguments: Any, **named: Any) -> Any:
        await self._way()
        answer = await self._bookie.read_last_confirmed(*arguments, **named)
        if self.cut == "answers":
            raise ConnectionLost("cut")
        return answer

    async def _way(self) -> None:
        await turns(self._rng.randint(0, 4))
        if self.cut == "requests":
            raise BookieUnavailable("cut")


class Play:
    """One seed."""

    def __init__(self, seed: int, shape: tuple[int, int, int]) -> None:
        self.rng = random.Random(f"{seed} {shape}")
        self.shape = shape
        self.store = LossyStore(self.rng)
        self.bookies = Bookies(*(f"b{n}" for n in range(shape[0] + 2)), metadata=self.store)
        self.views: list[dict[str, Reached]] = []
        self.ends: list[tuple[int, int]] = []

    def client(self) -> LedgerClient:
        view = {name: Reached(bookie, self.rng) for name, bookie in self.bookies.items()}
        self.views.append(view)
        return LedgerClient(
            StoredLedgers(self.store),
            LocalTransport(view),
            StaticBookies(dict.fromkeys(view, ("127.0.0.1", 1))),
            SETTINGS,
            random.Random(self.rng.random()),
            self.bookies.clock,
        )

    async def weather(self) -> None:
        """Ways break and heal."""
        while True:
            await turns(self.rng.randint(1, 12))
            view = self.rng.choice(self.views)
            reached = view[self.rng.choice(sorted(view))]
            reached.cut = self.rng.choice(["", "", "requests", "answers", "busy", "busy"])

    async def write(self, client: LedgerClient, heard: Confirmations) -> int:
        size, write_quorum, ack_quorum = self.shape
        writer = await client.create(ensemble_size=size, write_quorum=write_quorum, ack_quorum=ack_quorum)
        self.written.set_result(writer.ledger_id)
        for n in range(self.rng.randint(0, 25)):
            writer.append(b"%d" % n, heard)
            await turns(self.rng.choice([0, 0, 1, 5]))
        for _ in range(5):
            try:
                metadata = await writer.close()
            except MagnetarError:
                await turns(self.rng.randint(1, 30))  # and comes back
                continue
            self.ends.append((metadata.last_entry, metadata.length))
            break
        return writer.ledger_id

    async def recover(self, ledger_id: int) -> None:
        client = self.client()
        await turns(self.rng.randint(0, 40))
        for _ in range(8):
            try:
                reader = await client.open(ledger_id, recover=True)
            except MagnetarError:
                await turns(self.rng.randint(1, 20))
                continue
            self.ends.append((reader.last_add_confirmed, reader.metadata.length))
            break
        await client.close()

    async def run(self) -> Confirmations:
        heard = Confirmations()
        client = self.client()
        self.written: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        writing = asyncio.create_task(self.write(client, heard))
        ledger_id = await self.written
        self.store.loss = self.rng.choice([0.0, 0.03, 0.1])
        weather = asyncio.create_task(self.weather()) if self.rng.random() < 0.8 else None
        recoveries = [
            asyncio.create_task(self.recover(ledger_id)) for _ in range(self.rng.choice([0, 1, 2, 2]))
        ]
        async with asyncio.timeout(20):
            await asyncio.gather(writing, *recoveries)
        if weather is not None:
            weather.cancel()
        self.store.loss = 0.0
        await asyncio.gather(*self.store.late)
        for view in self.views:
            for reached in view.values():
                reached.cut = ""
        await client.close()
        await self.recover(ledger_id)
        await self.judge(ledger_id, heard)
        return heard

    async def judge(self, ledger_id: int, heard: Confirmations) -> None:
        node = await self.store.get(ledger_path(ledger_id))
        assert node is not None
        metadata = LedgerMetadata.decode(node.value, ledger_id)
        assert metadata.closed
        assert heard.ids == list(range(len(heard.ids))), "in order, each once"
        assert metadata.last_entry >= len(heard.ids) - 1, "truncated"
        assert set(self.ends) == {(metadata.last_entry, metadata.length)}, "two ends of one ledger"
        closes = [written for written in self.store.written if written.closed]
        assert len(closes) == 1, "closed once"
        length = 0
        for entry_id in range(metadata.last_entry + 1):
            bookies = metadata.ensemble_of(entry_id).bookies
            positions = metadata.striping.write_set(entry_id)
            copies = [self.bookies[bookies[p]].entries.get((ledger_id, entry_id)) for p in positions]
            there = [copy for copy in copies if copy is not None]
            assert len(there) >= metadata.ack_quorum, f"entry {entry_id} is on {len(there)} bookies"
            assert len(set(there)) == 1, f"the copies of entry {entry_id} differ"
            assert there[0][LEDGER_ENTRY_HEADER_BYTES:] == b"%d" % entry_id
            length += len(there[0]) - LEDGER_ENTRY_HEADER_BYTES
        assert metadata.length == length


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "WINDOW_ENTRIES", 16)
    monkeypatch.setattr(recovery, "RUN_ENTRIES", 4)
    monkeypatch.setattr("magnetar.ledger.writer.RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr("magnetar.ledger.recover.RETRY_PAUSE_S", 0.001)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "/".join(map(str, shape)))
async def test_whatever_is_cut_and_lost_every_confirmed_entry_is_there(shape: tuple[int, int, int]) -> None:
    confirmed = failed = changed = lost = unclosed = 0
    for seed in range(SEEDS):
        play = Play(seed, shape)
        try:
            heard = await play.run()
        except AssertionError as error:
            raise AssertionError(f"Play({seed}, {shape}): {error}") from error
        confirmed += len(heard.ids)
        failed += len(heard.errors)
        changed += sum(len(written.ensembles) > 1 for written in play.store.written)
        unclosed += sum(written.state is LedgerState.IN_RECOVERY for written in play.store.written)
        lost += play.store.lost
    assert confirmed > 3 * SEEDS, "a minimum load"
    assert min(failed, lost, unclosed) > 0, "the faults fired"
    assert changed


async def test_rule_15_ensemble_changes_of_a_recovery_reach_the_metadata_with_the_close_only() -> None:
    play = Play(0, (3, 3, 2))
    client, other = play.client(), play.client()
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    first, second, third = writer.metadata.last_ensemble.bookies
    heard = Confirmations()
    play.views[0][first].cut = play.views[0][second].cut = "requests"
    writer.append(b"0", heard)
    writer.detach()  # on the third bookie alone
    play.views[1][second].cut = "requests"
    reader = await other.open(writer.ledger_id, recover=True)
    assert reader.last_add_confirmed == 0
    assert [(m.state, len(m.ensembles)) for m in play.store.written] == [
        (LedgerState.IN_RECOVERY, 1),
        (LedgerState.CLOSED, 1),
    ]
    before, after = (m.last_ensemble.bookies for m in play.store.written)
    assert before == (first, second, third)
    assert after[0] == first
    assert after[1] != second
    await client.close()
    await other.close()


async def test_rule_16_the_loser_of_a_race_adopts_an_end_that_is_not_its_own() -> None:
    """One recovery saw that entry 0 was never confirmed, and closes late; the other one found a copy, and closed first."""
    play = Play(0, (3, 3, 2))
    client, blind, seeing = play.client(), play.client(), play.client()
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    first, second, third = writer.metadata.last_ensemble.bookies
    play.views[0][first].cut = play.views[0][second].cut = "requests"
    writer.append(b"0", Confirmations())
    writer.detach()
    held = asyncio.Event()
    play.store.hold_next_close(held)
    play.views[1][third].cut = "requests"
    losing = asyncio.create_task(blind.open(writer.ledger_id, recover=True))
    while play.store.holds_next_close:
        await asyncio.sleep(0)
    for name in play.bookies:
        if name not in (first, third):
            play.views[2][name].cut = "requests"
    winner = await seeing.open(writer.ledger_id, recover=True)
    assert winner.last_add_confirmed == 0
    held.set()
    loser = await losing
    assert loser.metadata == winner.metadata
    node = await play.store.get(ledger_path(writer.ledger_id))
    assert node is not None
    assert LedgerMetadata.decode(node.value, 0) == winner.metadata
    for each in (client, blind, seeing):
        await each.close()
