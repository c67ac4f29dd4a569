"""Ledgers in memory, for tests of what stands above them: durable at the next turn of the loop, or when the test says so.

`FakeLedgers` is what survives a crash of the broker; handles made by it are the broker's. Fencing, closing and the meaning
of last-add-confirmed are those of the real ledger client.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.proto.errors import (
    EntryDamaged,
    EntryNotFound,
    LedgerClosed,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
)
from magnetar.proto.ledger_entry import encode_ledger_entry

ConfirmCallback = Callable[[int, bytes, MagnetarError | None], None]


@dataclass
class StoredLedger:
    """What the bookies and the metadata hold of one ledger."""

    ledger_id: int
    properties: dict[str, str]
    striping: Striping
    entries: list[bytes] = field(default_factory=list)
    closed: bool = False
    fenced: bool = False


class FakeLedgers:
    """`magnetar.broker.resources.stores.Ledgers` in memory.

    `hold`: appends are stored but confirmed only by `confirm`. `fail_appends`: that many appends fail. `fail_create`,
    `fail_close`: errors to raise, one a call. `damaged`: (ledger, entry) that cannot be read any more. `unopened`: errors
    to raise, by ledger, as long as they are there.
    """

    def __init__(self) -> None:
        self.ledgers: dict[int, StoredLedger] = {}
        self.writers: dict[int, FakeWriter] = {}
        self.deleted: list[int] = []
        self.next_ledger_id = 0
        self.hold = False
        self.fail_create: deque[MagnetarError] = deque()
        self.fail_close: deque[MagnetarError] = deque()
        self.fail_delete: deque[MagnetarError] = deque()
        self.fail_read: deque[MagnetarError] = deque()
        self.damaged: set[tuple[int, int]] = set()
        self.unopened: dict[int, MagnetarError] = {}
        self.close_gate: asyncio.Event | None = None
        self.reads = 0
        self.log: list[str] = []

    async def create(
        self,
        *,
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        minimum_write_quorum: int,
        properties: dict[str, str],
        ledger_id: int | None = None,
        explicit_lac: bool = True,
        accepted: Callable[[int], None] | None = None,
        bookie_group: str = "",
    ) -> "FakeWriter":
        """A new ledger; `accepted` is not called: entries are durable as soon as they are accepted."""
        await asyncio.sleep(0)
        if self.fail_create:
            raise self.fail_create.popleft()
        sizes = Striping(ensemble_size, write_quorum, ack_quorum)
        ledger = StoredLedger(await self.next_id() if ledger_id is None else ledger_id, properties, sizes)
        self.ledgers[ledger.ledger_id] = ledger
        self.log.append(f"create {ledger.ledger_id}")
        writer = self.writers[ledger.ledger_id] = FakeWriter(self, ledger)
        return writer

    def check_placement(self, striping: Striping, minimum_write_quorum: int, bookie_group: str) -> None:
        """There are bookies enough."""

    async def next_id(self, count: int = 1) -> int:
        """Rises by so many."""
        self.next_ledger_id += count
        return self.next_ledger_id - count

    async def open(self, ledger_id: int, *, recover: bool) -> "FakeReader":
        """A reader; recovery fences and closes with everything that was stored."""
        await asyncio.sleep(0)
        if ledger_id in self.unopened:
            raise self.unopened[ledger_id]
        ledger = self.ledgers.get(ledger_id)
        if ledger is None:
            raise LedgerNotFound(f"ledger {ledger_id} does not exist")
        if recover and not ledger.closed:
            ledger.fenced = ledger.closed = True
            self.log.append(f"recover {ledger_id}")
        return FakeReader(self, ledger)

    async def delete(self, ledger_id: int) -> None:
        """Forgets the ledger."""
        await asyncio.sleep(0)
        if self.fail_delete:
            raise self.fail_delete.popleft()
        self.ledgers.pop(ledger_id, None)
        self.deleted.append(ledger_id)
        self.log.append(f"delete {ledger_id}")

    def suspects(self) -> tuple[str, ...]:
        """None."""
        return ()

    def figures(self) -> dict[str, int]:
        """None."""
        return {}

    def topic_ledgers(self) -> list[int]:
        """Ids of the ledgers that hold messages."""
        return [ledger.ledger_id for ledger in self.ledgers.values() if ledger.properties["kind"] == "topic"]

    def confirm(self, count: int = 1 << 30) -> None:
        """With `hold`: confirms the oldest appends of every writer."""
        for writer in list(self.writers.values()):
            writer.confirm(count)


class FakeReader:
    """Reads what is stored."""

    def __init__(self, owner: FakeLedgers, ledger: StoredLedger) -> None:
        self.owner = owner
        self.ledger = ledger
        self.ledger_id = ledger.ledger_id

    @property
    def last_add_confirmed(self) -> int:
        """The last stored entry."""
        return len(self.ledger.entries) - 1

    async def read(self, first: int, last: int, *, max_bytes: int = 0) -> list[bytes]:
        """At least one entry."""
        await asyncio.sleep(0)
        self.owner.reads += 1
        if self.owner.fail_read:
            raise self.owner.fail_read.popleft()
        found: list[bytes] = []
        size = 0
        for entry_id, entry in enumerate(self.ledger.entries[first : last + 1], first):
            if (self.ledger_id, entry_id) in self.owner.damaged:
                if not found:
                    raise EntryDamaged(f"entry {entry_id} of ledger {self.ledger_id} is damaged")
                break
            size += len(entry)
            if found and max_bytes and size > max_bytes:
                break
            found.append(entry)
        if not found:
            raise EntryNotFound(f"ledger {self.ledger_id} has no entry {first}")
        return found


class FakeWriter(FakeReader):
    """Appends; see `FakeLedgers` for what can be made to go wrong."""

    def __init__(self, owner: FakeLedgers, ledger: StoredLedger) -> None:
        super().__init__(owner, ledger)
        self.length = 0
        self.replaceable = False  # there is a better one, as for a degraded ledger when bookies are back
        self.last_confirmed = -1
        self.failing: MagnetarError | None = None
        self.fail_after: int | None = None  # entries with this id and later fail
        self.store_failed = False  # a failing append reaches the disk all the same
        self.waiting: deque[tuple[int, bytes, ConfirmCallback]] = deque()
        self._scheduled = False

    @property
    def last_add_confirmed(self) -> int:
        """What was confirmed; after a recovery, where the ledger ends."""
        return self.last_confirmed

    def append(self, payload: bytes, confirmed: ConfirmCallback) -> int:
        """Stored at once, confirmed later."""
        self.length += len(payload)
        entry_id = self.last_confirmed + 1 + len(self.waiting)
        entry = encode_ledger_entry(self.ledger_id, entry_id, self.last_confirmed, self.length, payload)
        if self.ledger.fenced:
            self.failing = LedgerFenced("fenced")
        elif self.ledger.closed:
            self.failing = LedgerClosed("closed")
        elif self.failing is None and (
            self.fail_after is None or entry_id < self.fail_after or self.store_failed
        ):
            self.ledger.entries.append(entry)
        self.waiting.append((entry_id, entry, confirmed))
        if not self.owner.hold and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.confirm)
        return entry_id

    def confirm(self, count: int = 1 << 30) -> None:
        """Confirms, or fails, the oldest `count` appends."""
        self._scheduled = False
        while self.waiting and count:
            count -= 1
            entry_id, entry, confirmed = self.waiting.popleft()
            if self.ledger.fenced:
                self.failing = LedgerFenced("fenced")
            elif self.fail_after is not None and entry_id >= self.fail_after:
                self.failing = self.failing or MagnetarError("the bookie has failed")
            if self.failing is None:
                self.last_confirmed = entry_id
            confirmed(entry_id, entry, self.failing)

    @property
    def metadata(self) -> LedgerMetadata:
        """On bookies that do not exist."""
        bookies = tuple(f"bookie-{number}" for number in range(self.ledger.striping.ensemble_size))
        return LedgerMetadata.create(self.ledger.striping, bookies, 0, self.ledger.properties)

    async def force(self) -> None:
        """All is durable."""

    def detach(self) -> None:
        """Left as it is."""
        self.waiting.clear()

    async def close(self) -> SimpleNamespace:
        """Closed at what was confirmed."""
        self.owner.log.append(f"closing {self.ledger_id}")
        if self.owner.close_gate is not None:
            await self.owner.close_gate.wait()
        await asyncio.sleep(0)
        if self.owner.fail_close:
            raise self.owner.fail_close.popleft()
        if self.ledger.fenced:
            raise LedgerFenced(f"ledger {self.ledger_id} was fenced")
        self.ledger.closed = True
        del self.ledger.entries[self.last_confirmed + 1 :]
        self.owner.log.append(f"closed {self.ledger_id}")
        return SimpleNamespace(last_entry=self.last_confirmed, length=self.length)
