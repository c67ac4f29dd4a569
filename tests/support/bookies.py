"""Bookies in memory for tests of what stands above them: the real rules of fencing, failures on demand, no disk.

bookies = Bookies("b1", "b2", "b3")
client = bookies.client()
bookies["b2"].hold()            # adds are taken and not answered
bookies["b2"].release()
bookies["b3"].fail(BookieUnavailable("down"))
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from magnetar.ledger import LedgerClient, LedgerMetadata, LedgerSettings, LocalTransport, StaticBookies
from magnetar.metadata import MetadataStore
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.proto.commands import ADD_ACCEPTED
from magnetar.proto.errors import EntryNotFound, LedgerFenced, LedgerNotFound, MagnetarError
from magnetar.proto.ledger_entry import verify_ledger_entry
from magnetar.proto.stripe import EVERY_ENTRY, Stripe
from support.answering import Answering
from support.memory_metadata import MemoryMetadataStore

Done = Callable[[int, int, int], None]


class StillClock:
    """A wall clock that stands."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.now = now_ms

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return self.now


class FakeBookie(Answering):
    """One bookie: `ledger.local_transport.LocalBookie`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[tuple[int, int], bytes] = {}
        self.confirmed: dict[int, int] = {}
        self.fenced: dict[int, None] = {}
        self.calls: list[tuple[Any, ...]] = []  # what was asked, adds excepted
        self.adds = 0
        self.forces = 0
        self.drop_adds = False  # a process that hangs: it stores and answers none of them, ever
        self.hold_durable = False  # a disk that does not sync what was deferred
        self.unsynced: list[tuple[int, int, Done]] = []  # deferred adds that nothing has synced
        self._held: list[tuple[int, int, Done]] | None = None
        self._reads_go = asyncio.Event()
        self._reads_go.set()
        self._error: MagnetarError | None = None
        self._answers: list[tuple[Done, int, int, int]] = []
        self.accepting = True
        self.on_accepting: list[Callable[[], None]] = []

    @property
    def waits_for_room(self) -> bool:
        """While it takes none."""
        return not self.accepting

    def hold(self) -> None:
        """Answers nothing until `release`: a hung process."""
        self._held = []
        self._reads_go.clear()

    def hold_adds(self) -> None:
        """Takes adds and answers none of them until `release`; everything else is answered."""
        self._held = []

    def forget_held(self) -> None:
        """What is held is never answered; what comes from now on is."""
        self._held = None
        self._reads_go.set()

    def release(self, code: int = 0) -> None:
        """Answers everything held, in order; adds with this error code."""
        held, self._held = self._held or [], None
        self._reads_go.set()
        for ledger_id, entry_id, done in held:
            self._answer(done, ledger_id, entry_id, code)

    def fail(self, error: MagnetarError | None) -> None:
        """Everything fails with this from now on; None: all is well again."""
        self._error = error

    def add(self, entry: bytes, *, recovery: bool, done: Done, deferred: bool = False) -> None:
        """Stores at once, answers in the next turn: one wake-up for all adds of a turn, as a journal's.

        A deferred one is lost by `restart`, until there is a synced one or a force.
        """
        header = verify_ledger_entry(entry)
        ledger_id, entry_id = header.ledger_id, header.entry_id
        self.adds += 1
        if self.drop_adds:
            return
        if self._error is not None:
            asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, self._error.code)
            return
        if ledger_id in self.fenced and not recovery:
            asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, LedgerFenced.code)
            return
        self.entries[ledger_id, entry_id] = entry
        self.confirmed[ledger_id] = max(self.confirmed.get(ledger_id, -1), header.last_add_confirmed)
        if deferred:
            self.unsynced.append((ledger_id, entry_id, done))
            if self._held is None:
                asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, ADD_ACCEPTED)
            return
        self._sync()
        self._done(ledger_id, entry_id, done)

    def request_force(self, ledger_id: int) -> None:
        """What was accepted becomes durable."""
        self.forces += 1
        self._sync()

    def _sync(self) -> None:
        if self.hold_durable:
            return
        unsynced, self.unsynced = self.unsynced, []
        for ledger_id, entry_id, done in unsynced:
            self._done(ledger_id, entry_id, done)

    def restart(self) -> None:
        """The power fails: what was accepted and not synced is lost, and nobody is notified."""
        for ledger_id, entry_id, _ in self.unsynced:
            self.entries.pop((ledger_id, entry_id), None)
        self.unsynced = []

    def _done(self, ledger_id: int, entry_id: int, done: Done) -> None:
        if self._held is not None:
            self._held.append((ledger_id, entry_id, done))
        else:
            self._answer(done, ledger_id, entry_id)

    def _answer(self, done: Done, ledger_id: int, entry_id: int, code: int = 0) -> None:
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._answer_all)
        self._answers.append((done, ledger_id, entry_id, code))

    def _answer_all(self) -> None:
        answers, self._answers = self._answers, []
        for done, ledger_id, entry_id, code in answers:
            done(ledger_id, entry_id, code)

    async def _ready(self, ledger_id: int, fence: bool) -> None:
        await asyncio.sleep(0)
        await self._reads_go.wait()
        if self._error is not None:
            raise self._error
        if fence:
            self.fenced[ledger_id] = None

    async def read(
        self,
        ledger_id: int,
        first: int,
        last: int,
        *,
        max_bytes: int,
        fence: bool,
        stripe: Stripe = EVERY_ENTRY,
    ) -> tuple[list[bytes], int]:
        """Entries of the stripe from `first` on up to the first gap."""
        stripe.check(first, last)
        self.calls.append(("read", ledger_id, first, last, fence))
        await self._ready(ledger_id, fence)
        found: list[bytes] = []
        size = 0
        for entry_id in stripe.ids(first, last):
            entry = self.entries.get((ledger_id, entry_id))
            if entry is None or (found and max_bytes and size + len(entry) > max_bytes):
                break
            found.append(entry)
            size += len(entry)
        if not found:
            raise EntryNotFound(f"no entry {first}")
        return found, self.confirmed.get(ledger_id, -1)

    async def read_last_confirmed(self, ledger_id: int, *, fence: bool) -> tuple[int, int]:
        """LAC and last entry."""
        self.calls.append(("read_last_confirmed", ledger_id, fence))
        await self._ready(ledger_id, fence)
        ids = [entry_id for ledger, entry_id in self.entries if ledger == ledger_id]
        if not ids and ledger_id not in self.fenced:
            raise LedgerNotFound(f"no ledger {ledger_id}")
        return self.confirmed.get(ledger_id, -1), max(ids, default=-1)

    async def write_last_confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Explicit LAC."""
        self.calls.append(("write_last_confirmed", ledger_id, last_add_confirmed))
        await self._ready(ledger_id, False)
        self.confirmed[ledger_id] = max(self.confirmed.get(ledger_id, -1), last_add_confirmed)

    async def wait_last_confirmed(
        self, ledger_id: int, last_add_confirmed: int, *, timeout_s: float, max_entries: int, max_bytes: int
    ) -> tuple[int, bool, list[bytes]]:
        """Looks again every millisecond."""
        self.calls.append(("wait_last_confirmed", ledger_id, last_add_confirmed))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await self._ready(ledger_id, False)
        while self.confirmed.get(ledger_id, -1) <= last_add_confirmed and loop.time() < deadline:
            if ledger_id in self.fenced:
                break
            await asyncio.sleep(0.001)
        confirmed = self.confirmed.get(ledger_id, -1)
        entries: list[bytes] = []
        if max_entries and confirmed > last_add_confirmed:
            last = min(confirmed, last_add_confirmed + max_entries)
            with contextlib.suppress(EntryNotFound):
                first = last_add_confirmed + 1
                entries, _ = await self.read(ledger_id, first, last, max_bytes=max_bytes, fence=False)
        return confirmed, ledger_id in self.fenced, entries

    async def delete_ledger(self, ledger_id: int) -> None:
        """Forgets the entries."""
        self.calls.append(("delete_ledger", ledger_id))
        await self._ready(ledger_id, False)
        self.entries = {key: entry for key, entry in self.entries.items() if key[0] != ledger_id}

    def list_ledgers(self, after: int, count: int) -> tuple[Sequence[tuple[int, bool, bool, int, int]], bool]:
        """All of them."""
        ids = sorted(dict.fromkeys([ledger for ledger, _ in self.entries if ledger > after]))
        rows = [
            (
                ledger_id,
                ledger_id in self.fenced,
                False,
                max(entry_id for ledger, entry_id in self.entries if ledger == ledger_id),
                self.confirmed.get(ledger_id, -1),
            )
            for ledger_id in ids
        ]
        return rows[:count], len(rows) > count

    async def list_entries(
        self, ledger_id: int, first: int, count: int
    ) -> tuple[Sequence[tuple[int, int]], int]:
        """One range for each."""
        ids = sorted(number for ledger, number in self.entries if ledger == ledger_id and number >= first)
        return [(number, number) for number in ids[:count]], ids[count] if len(ids) > count else -1

    def info(self) -> dict[str, Any]:
        """As BookieInfo."""
        return {"bookie_id": self.name, "free_bytes": 1 << 30, "total_bytes": 1 << 31, "read_only": False}


class Bookies(dict[str, FakeBookie]):
    """A cluster of fake bookies with one metadata store; any number of clients."""

    def __init__(self, *names: str, metadata: MetadataStore | None = None) -> None:
        super().__init__((name, FakeBookie(name)) for name in names)
        self.metadata = metadata or MemoryMetadataStore()
        self.clock = StillClock()

    async def stored_metadata(self, ledger_id: int) -> LedgerMetadata:
        """Of a ledger, as the store has it."""
        node = await self.metadata.get(ledger_path(ledger_id))
        assert node is not None
        return LedgerMetadata.decode(node.value, ledger_id)

    def directory(self) -> StaticBookies:
        """Of all of them, for a client whose test changes what it says."""
        return StaticBookies(dict.fromkeys(self, ("127.0.0.1", 1)))

    def client(
        self,
        settings: LedgerSettings | None = None,
        seed: int = 0,
        directory: StaticBookies | None = None,
    ) -> LedgerClient:
        """A ledger client of its own, as another process would have."""
        return LedgerClient(
            StoredLedgers(self.metadata),
            LocalTransport(self),
            directory or self.directory(),
            settings or LedgerSettings(),
            random.Random(seed),
            self.clock,
        )


class Confirmations:
    """A confirm callback that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, bytes, MagnetarError | None]] = []
        self._expected: list[tuple[int, asyncio.Future[None]]] = []

    def __call__(self, entry_id: int, entry: bytes, error: MagnetarError | None) -> None:
        self.heard.append((entry_id, entry, error))
        for count, future in self._expected:
            if len(self.heard) >= count and not future.done():
                future.set_result(None)

    @property
    def ids(self) -> list[int]:
        """Entry ids confirmed, in the order heard."""
        return [entry_id for entry_id, _, error in self.heard if error is None]

    @property
    def errors(self) -> list[type[MagnetarError]]:
        """Classes of the errors, in the order heard."""
        return [type(error) for _, _, error in self.heard if error is not None]

    async def count(self, number: int) -> None:
        """Waits until so many calls came."""
        if len(self.heard) < number:
            future = asyncio.get_running_loop().create_future()
            self._expected.append((number, future))
            await asyncio.wait_for(future, 10)
