"""What one process of a bookie is asked and what it has promised: `Session` asks and checks, `Promises` remembers.

A promise is what was acknowledged: an entry, a fence, a last add confirmed, a deletion. What a bookie served after a start
is one as well, since it was flushed by then.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from magnetar.bookie import Bookie
from magnetar.proto.errors import (
    EntryDamaged,
    EntryNotFound,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    TooManyRequests,
)
from magnetar.proto.ledger_entry import NO_ENTRY, encode_ledger_entry

if TYPE_CHECKING:
    from support.storage_check import Machine

KIB = 1024
Key = tuple[int, int]


class Promises:
    """What the bookie acknowledged, and what it was asked for."""

    def __init__(self) -> None:
        # All bytes that were ever added under a key, in order, and how many of them are the past: index of the
        # newest acknowledged one. A key is here from the moment it is asked for.
        self.versions: dict[Key, list[bytes]] = {}
        self.acknowledged: dict[Key, int] = {}
        self.fenced: dict[int, None] = {}
        self.last_confirmed: dict[int, int] = {}
        # Of the acknowledged entries. One that a flush saved without its journal record may lie beyond it.
        self.last_entry: dict[int, int] = {}
        # Ledgers that somebody asked to delete; and those of which this was acknowledged, which stay deleted (rule 7).
        self.doomed: dict[int, None] = {}
        self.deleted: dict[int, None] = {}
        # Asked for at the bookie, which may still be on its way.
        self.by_name: dict[int, None] = {}

    def asked(self, key: Key, entry: bytes) -> int:
        """An entry goes to the bookie; returns the number of this version."""
        versions = self.versions.setdefault(key, [])
        versions.append(entry)
        return len(versions) - 1

    def holds(self, key: Key, version: int) -> None:
        """This version, or a later one, is durable."""
        self.acknowledged[key] = max(version, self.acknowledged.get(key, -1))

    def ledgers(self) -> list[int]:
        """Everything that was asked for."""
        return sorted({ledger for ledger, _ in self.versions} | {*self.fenced} | {*self.doomed})

    def confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """The bookie said that it knows of this last add confirmed."""
        known = self.last_confirmed.get(ledger_id, NO_ENTRY)
        self.last_confirmed[ledger_id] = max(known, last_add_confirmed)


class Session:
    """One process of the bookie, while a script runs in it."""

    def __init__(self, machine: Machine, bookie: Bookie) -> None:
        self.machine = machine
        self.bookie = bookie
        self.promises = machine.promises
        self.rng = random.Random(machine.seed)

    def add_soon(
        self, ledger_id: int, entry_id: int, *, recovery: bool = False, size: int = 0
    ) -> asyncio.Future[int]:
        """Adds an entry of its own bytes; the future has the code of the answer."""
        promises, loop = self.promises, asyncio.get_running_loop()
        self.machine.existing.created[ledger_id] = None
        version = len(promises.versions.get((ledger_id, entry_id), []))
        text = b"%d:%d version %d " % (ledger_id, entry_id, version)
        payload = (text * (1 + (size or self.rng.choice((50, 700, 2000, 5000))) // len(text)))[: 7 * KIB]
        data = encode_ledger_entry(ledger_id, entry_id, entry_id - 1, (entry_id + 1) * len(payload), payload)
        assert promises.asked((ledger_id, entry_id), data) == version
        # What was acknowledged before this add came, not before its answer.
        fenced, deleted = ledger_id in promises.fenced, ledger_id in promises.deleted
        answer: asyncio.Future[int] = loop.create_future()

        def done(ledger: int, entry: int, code: int) -> None:
            assert (ledger, entry) == (ledger_id, entry_id)
            if not code:
                self.machine.acknowledge(f"add {ledger}:{entry}", ledger_id=ledger)
                promises.holds((ledger, entry), version)
                promises.confirmed(ledger, entry - 1)
                promises.last_entry[ledger] = max(entry, promises.last_entry.get(ledger, NO_ENTRY))
                if fenced and not recovery:
                    self.machine.broken(f"an add to the fenced ledger {ledger} was acknowledged")
                if deleted:
                    self.machine.broken(f"an add to the deleted ledger {ledger} was acknowledged")
            answer.set_result(code)

        self.bookie.add(data, recovery=recovery, done=done)
        return answer

    async def fence(self, ledger_id: int) -> None:
        """Fences by way of a read, as a recovery does."""
        self.machine.existing.created[ledger_id] = None
        try:
            await self.bookie.read_last_confirmed(ledger_id, fence=True)
        except MagnetarError:
            return
        self.machine.acknowledge(f"fence {ledger_id}")
        self.promises.fenced[ledger_id] = None

    async def write_last_confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Explicit last add confirmed."""
        self.machine.existing.created[ledger_id] = None
        try:
            await self.bookie.write_last_confirmed(ledger_id, last_add_confirmed)
        except MagnetarError:
            return
        self.machine.acknowledge(f"last confirmed {ledger_id}")
        self.promises.confirmed(ledger_id, last_add_confirmed)

    async def checkpoint(self) -> None:
        """A checkpoint; a failure shows elsewhere."""
        try:
            await self.bookie.checkpoint()
        except MagnetarError:
            return

    async def delete(self, ledger_id: int) -> None:
        """Deletes a ledger by name."""
        self.promises.doomed[ledger_id] = self.promises.by_name[ledger_id] = None
        try:
            await self.bookie.delete_ledger(ledger_id)
        except MagnetarError:
            return
        self.machine.acknowledge(f"deletion of {ledger_id}")
        self.promises.deleted[ledger_id] = None

    def delete_in_metadata(self, ledger_id: int) -> None:
        """The next round of garbage collection finds it deleted."""
        self.promises.doomed[ledger_id] = None
        self.machine.existing.deleted[ledger_id] = None

    async def collect_garbage(self) -> None:
        """A round, with a major compaction. What metadata had deleted before it, and the index lists, is deleted then."""
        promises = self.promises
        deleted = [
            ledger_id for ledger_id in self.machine.existing.deleted if ledger_id not in promises.by_name
        ]
        try:
            await self.bookie.collector.collect()
            for ledger_id in deleted:
                if await self.is_deleted(ledger_id) and self.machine.failure is None:
                    promises.deleted[ledger_id] = None
        except MagnetarError:
            return

    async def is_deleted(self, ledger_id: int) -> bool:
        """Whether the bookie says so."""
        try:
            await self.bookie.read_last_confirmed(ledger_id)
        except LedgerNotFound as error:
            return "deleted" in error.message
        return False

    async def check_entry(self, key: Key) -> None:
        """An entry is what was added last, or later; one that was not acknowledged may be missing."""
        promises, machine = self.promises, self.machine
        versions, known = promises.versions.get(key, []), promises.acknowledged.get(key, -1)
        deleted = key[0] in promises.deleted
        try:
            found, _ = await self.bookie.read(key[0], key[1], key[1])
        except EntryNotFound:
            if deleted:
                machine.broken(f"entry {key} is not found, but nothing is said of its ledger's deletion")
            if known >= 0:
                machine.broken(f"the acknowledged entry {key} is said not to exist")
            return
        except LedgerNotFound:
            if key[0] not in promises.doomed and (known >= 0 or key[0] in promises.fenced):
                machine.broken(f"the ledger of entry {key} is said not to exist")
            return
        except EntryDamaged as error:
            if machine.damaged is None or key[0] in promises.doomed:
                machine.broken(f"entry {key} is damaged: {error}")
            machine.damaged.append(key)  # type: ignore[union-attr]
            return
        if deleted:
            machine.broken(f"entry {key} of a deleted ledger is served")
        if found[0] not in versions:
            machine.broken(f"wrong bytes for entry {key}")
        # The bytes before the last acknowledged ones are as wrong as any others.
        if found[0] not in versions[max(known, 0) :] and not machine.older_copies:
            machine.broken(f"entry {key} is an old copy")

    async def check_range(self, ledger_id: int, first: int, last: int) -> None:
        """Reads on as a sequential reader does, and checks each entry."""
        while first <= last:
            known = [self.promises.acknowledged.get((ledger_id, n), 0) for n in range(first, last + 1)]
            try:
                found, _ = await self.bookie.read(ledger_id, first, last, max_bytes=6 * KIB)
            except (EntryNotFound, EntryDamaged, LedgerNotFound):
                await self.check_entry((ledger_id, first))
                first += 1
                continue
            for number, data in enumerate(found, first):
                versions = self.promises.versions[ledger_id, number]
                if data not in versions[known[number - first] :]:
                    self.machine.broken(f"entry {(ledger_id, number)} is an old or a wrong copy")
            first += len(found)

    async def check_promises(self) -> None:
        """Everything at once."""
        promises = self.promises
        for key in sorted(promises.versions):
            await self.check_entry(key)
        for ledger_id in promises.ledgers():
            await self.check_ledger(ledger_id)

    async def check_ledger(self, ledger_id: int) -> None:
        """What is known of a ledger besides its entries."""
        promises, machine = self.promises, self.machine
        try:
            known, last_entry = await self.bookie.read_last_confirmed(ledger_id)
        except LedgerNotFound:
            if ledger_id in promises.doomed:
                if ledger_id in promises.deleted:
                    await self.check_tombstone(ledger_id)
                return
            known, last_entry = NO_ENTRY, NO_ENTRY
            if ledger_id in promises.fenced:
                machine.broken(f"the fenced ledger {ledger_id} is not known")
        if ledger_id in promises.deleted:
            machine.broken(f"the deleted ledger {ledger_id} is known again")
        if known < promises.last_confirmed.get(ledger_id, NO_ENTRY):
            machine.broken(f"the last add confirmed of ledger {ledger_id} fell to {known}")
        if last_entry < promises.last_entry.get(ledger_id, NO_ENTRY):
            machine.broken(f"the last entry of ledger {ledger_id} fell to {last_entry}")
        if ledger_id in promises.fenced and ledger_id not in promises.doomed:
            await self.check_fence(ledger_id)

    async def check_tombstone(self, ledger_id: int) -> None:
        """Neither a stale writer nor a recovery brings it back (rule 7)."""
        for recovery in (False, True):
            code = await self.ask_until_answered(ledger_id, recovery)
            if code != LedgerFenced.code:
                self.machine.broken(f"an add to the deleted ledger {ledger_id} is answered {code}")

    async def check_fence(self, ledger_id: int) -> None:
        """An add is refused."""
        code = await self.ask_until_answered(ledger_id, False)
        if code != LedgerFenced.code:
            self.machine.broken(f"an add to the fenced ledger {ledger_id} is answered {code}")

    async def ask_until_answered(self, ledger_id: int, recovery: bool) -> int:
        """The code of an add; a bookie whose write cache is full says so before it looks at the ledger."""
        while (code := await self.add_soon(ledger_id, 999, recovery=recovery)) == TooManyRequests.code:
            await asyncio.sleep(0.1)
        return code

    async def promote(self) -> None:
        """What a bookie serves after its start is durable: from now on it is a promise."""
        promises = self.promises
        for key in sorted(promises.versions):
            try:
                found, _ = await self.bookie.read(key[0], key[1], key[1])
            except MagnetarError:
                continue
            versions = promises.versions[key]
            promises.holds(key, max(n for n, data in enumerate(versions) if data == found[0]))
