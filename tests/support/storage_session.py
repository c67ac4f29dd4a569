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

    def asked(self, key: Key, entry: bytes) -> int:
        """An entry goes to the bookie; returns the number of this version."""
        versions = self.versions.setdefault(key, [])
        versions.append(entry)
        return len(versions) - 1

    def holds(self, key: Key, version: int) -> None:
        """This version, or a later one, is durable."""
        self.acknowledged[key] = max(version, self.acknowledged.get(key, -1))

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
        version = len(promises.versions.get((ledger_id, entry_id), []))
        text = b"%d:%d version %d " % (ledger_id, entry_id, version)
        payload = (text * (1 + (size or self.rng.choice((50, 700, 2000, 5000))) // len(text)))[: 7 * KIB]
        data = encode_ledger_entry(ledger_id, entry_id, entry_id - 1, (entry_id + 1) * len(payload), payload)
        assert promises.asked((ledger_id, entry_id), data) == version
        answer: asyncio.Future[int] = loop.create_future()

        def done(ledger: int, entry: int, code: int) -> None:
            assert (ledger, entry) == (ledger_id, entry_id)
            if not code:
                self.machine.acknowledge(f"add {ledger}:{entry}", at_once=True)
                promises.holds((ledger, entry), version)
                promises.confirmed(ledger, entry - 1)
                promises.last_entry[ledger] = max(entry, promises.last_entry.get(ledger, NO_ENTRY))
                if ledger_id in promises.fenced and not recovery and version == 0:
                    self.machine.broken(f"an add to the fenced ledger {ledger} was acknowledged")
            answer.set_result(code)

        self.bookie.add(data, recovery=recovery, done=done)
        return answer

    async def fence(self, ledger_id: int) -> None:
        """Fences by way of a read, as a recovery does."""
        try:
            await self.bookie.read_last_confirmed(ledger_id, fence=True)
        except MagnetarError:
            return
        self.machine.acknowledge(f"fence {ledger_id}")
        self.promises.fenced[ledger_id] = None

    async def write_last_confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Explicit last add confirmed."""
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

    async def check_entry(self, key: Key) -> None:
        """An entry is what was added last, or later; one that was not acknowledged may be missing."""
        versions, known = self.promises.versions.get(key, []), self.promises.acknowledged.get(key, -1)
        try:
            found, _ = await self.bookie.read(key[0], key[1], key[1])
        except EntryNotFound:
            if known >= 0:
                self.machine.broken(f"the acknowledged entry {key} is said not to exist")
            return
        except EntryDamaged as error:
            if self.machine.damaged is None:
                self.machine.broken(f"entry {key} is damaged: {error}")
            self.machine.damaged.append(key)  # type: ignore[union-attr]
            return
        if found[0] not in versions:
            self.machine.broken(f"wrong bytes for entry {key}")
        # The bytes before the last acknowledged ones are as wrong as any others.
        if found[0] not in versions[max(known, 0) :]:
            self.machine.broken(f"entry {key} is an old copy")

    async def check_range(self, ledger_id: int, first: int, last: int) -> None:
        """Reads on as a sequential reader does, and checks each entry."""
        while first <= last:
            known = [self.promises.acknowledged.get((ledger_id, n), 0) for n in range(first, last + 1)]
            try:
                found, _ = await self.bookie.read(ledger_id, first, last, max_bytes=6 * KIB)
            except (EntryNotFound, EntryDamaged):
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
        for ledger_id in sorted({ledger for ledger, _ in promises.versions} | {*promises.fenced}):
            try:
                known, last_entry = await self.bookie.read_last_confirmed(ledger_id)
            except LedgerNotFound:
                known, last_entry = NO_ENTRY, NO_ENTRY
                if ledger_id in promises.fenced:
                    self.machine.broken(f"the fenced ledger {ledger_id} is not known")
            if known < promises.last_confirmed.get(ledger_id, NO_ENTRY):
                self.machine.broken(f"the last add confirmed of ledger {ledger_id} fell to {known}")
            if last_entry < promises.last_entry.get(ledger_id, NO_ENTRY):
                self.machine.broken(f"the last entry of ledger {ledger_id} fell to {last_entry}")
            if ledger_id in promises.fenced:
                await self.check_fence(ledger_id)

    async def check_fence(self, ledger_id: int) -> None:
        """An add is refused; a bookie whose write cache is full says so before it looks."""
        for _ in range(50):
            code = await self.add_soon(ledger_id, 999)
            if code != TooManyRequests.code:
                break
            await asyncio.sleep(0.1)
        if code != LedgerFenced.code:
            self.machine.broken(f"an add to the fenced ledger {ledger_id} is answered {code}")

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
