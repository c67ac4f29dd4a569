"""A running bookie's answers to `magnetar bookie ...`: what the offline tools say of a stopped one, from the same walks.

Each command takes texts and answers with objects: what `--json` prints. A walk
runs in slices of the loop, and the disk worker brings its file into the page cache before it. What changes meanwhile may or
may not be in the answer: the newest bytes of a journal or of a current entry log look torn. Journals that a checkpoint
releases while they are read are not taken for damaged ones: who asks is told to ask again.

Ledgers are listed and entries read only here, not of a stopped bookie. `verify` does not read everything again but tells
what the scrub has verified, and when.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, TypeVar

from magnetar.proto.errors import (
    DataDirectoryError,
    EntryDamaged,
    EntryNotFound,
    InvalidArgument,
    LedgerNotFound,
    MagnetarError,
    ServiceNotReady,
)

from .cookie import Cookie
from .disk_worker import DiskWorker
from .engine import Bookie
from .index import LocationIndex
from .offline.entry_logs import StoredEntry, find_log, stored_entry, walk_entry_log
from .offline.identity import describe, describe_cookie
from .offline.journals import walk_journals
from .offline.stopped import LogFile
from .offline.verify import DAMAGE, SOUND, WAITING, Verification, VerifiedPart

T = TypeVar("T")
# From the arguments to objects for JSON. Raises MagnetarError, which may come behind some of them.
Command = Callable[[Mapping[str, str]], AsyncIterator[dict[str, Any]]]
_SLICE_ITEMS = 100
_WARM_BYTES = 4 << 20
_MAX_ID = (1 << 63) - 1


class BookieShell:
    """The commands of one running bookie: see `queries`, and `changes`."""

    def __init__(self, bookie: Bookie) -> None:
        self._bookie = bookie
        self._data = _RunningData(bookie)

    def queries(self) -> dict[str, Command]:
        """They change nothing."""
        return {
            "info": self._info,
            "cookie": self._cookie,
            "ledgers": self._ledgers,
            "read": self._read,
            "journal": self._journal,
            "entrylog": self._entry_log,
            "verify": self._verify,
        }

    def changes(self) -> dict[str, Command]:
        """They change something."""
        return {"convert-to-read-only": self._convert_to_read_only}

    async def _info(self, _arguments: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        yield describe(self._data, running=True) | {
            "read_only": self._bookie.read_only,
            "read_only_reason": self._bookie.disk_space.reason,
        }

    async def _cookie(self, _arguments: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        yield describe_cookie(self._data, self._bookie.cookie)

    async def _ledgers(self, arguments: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        ledger_id = _number(arguments, "ledger", None)
        listing = self._bookie.listing
        if ledger_id is not None:
            yield (await listing.summary(ledger_id))._asdict()
            return
        unsaved = sorted(self._bookie.ledgers.unsaved())
        following = listing.next_ledger(-1, unsaved)
        while following is not None:
            with contextlib.suppress(LedgerNotFound):  # it was forgotten since
                yield (await listing.summary(following))._asdict()
            await asyncio.sleep(0)
            following = listing.next_ledger(following, unsaved)

    async def _read(self, arguments: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        ledger_id = _number(arguments, "ledger", 0)
        first, last = _number(arguments, "first", 0), _number(arguments, "last", _MAX_ID)
        following = first
        while 0 <= following <= last:
            ranges, following = await self._bookie.list_entries(ledger_id, following)
            for begin, end in ranges:
                for entry_id in range(begin, min(end, last) + 1):
                    with contextlib.suppress(EntryNotFound):  # it was deleted since
                        entry = await self._entry(ledger_id, entry_id)
                        yield entry._asdict() | {"data": base64.b64encode(entry.data).decode()}

    async def _entry(self, ledger_id: int, entry_id: int) -> StoredEntry:
        location = self._bookie.index.get(ledger_id, entry_id)
        if location is None or self._bookie.cache.get(ledger_id, entry_id) is not None:
            source, path, position = "write cache", "", -1
        else:
            source, position = "entry log", location.offset
            path = self._bookie.logs.path_of(location.log_id) or ""
        data, damage = b"", ""
        try:
            (data,), _ = await self._bookie.read(ledger_id, entry_id, entry_id)
        except EntryDamaged as error:
            damage = error.message
        return stored_entry(ledger_id, entry_id, source, path, position, data, damage)

    async def _journal(self, arguments: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        bookie = self._bookie
        items = walk_journals(
            self._data,
            journal=_number(arguments, "journal", None),
            file=arguments.get("file", ""),
            from_mark=bool(arguments.get("from_mark")),
        )
        mark = bookie.checkpointer.mark
        # Files from these sequences on are written to while they are read.
        written = {one.directory: one.durable_position().sequence for one in bookie.journals.all}
        warmer, being_written = _Warmer(bookie.components.disk_worker, "", 0), False
        try:
            async for row in _in_slices(items):
                if row["kind"] == "file":
                    first = written.get(os.path.dirname(row["path"]))
                    being_written = first is not None and row["sequence"] >= first
                    warmer = _Warmer(bookie.components.disk_worker, row["path"], row["bytes"])
                    await warmer.reach(0)
                elif row["kind"] == "record":
                    await warmer.reach(row["position"])
                elif row["kind"] == "gap" and row["damage"]:
                    if bookie.checkpointer.mark != mark:
                        raise _released()
                    if being_written:
                        row |= {"verdict": "being written", "damage": False}
                yield row
        except DataDirectoryError as error:
            if bookie.checkpointer.mark != mark:
                raise _released() from error
            raise

    async def _entry_log(self, arguments: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        log = find_log(self._data, arguments.get("log", ""))
        warmer = _Warmer(self._bookie.components.disk_worker, log.path, log.bytes)
        await warmer.reach(0)
        async for row in _in_slices(walk_entry_log(self._data, log)):
            await warmer.reach(row.get("position", 0))
            yield row

    async def _verify(self, _arguments: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        result, damage = Verification(), self._bookie.damage
        files = damage.files()
        for damaged_file, reason in files.items():
            result.found("file", damaged_file, reason)
        for ledger_id, ranges in damage.ledgers().items():
            for found in ranges:
                what = f"entries {found.first} to {found.last}: {found.reason}"
                result.found("entry", found.where, what, ledger_id=ledger_id, entry_id=found.first)
        now = self._bookie.components.clock.now_ms()
        for unit, size, verified_ms in self._bookie.scrubber.verified():
            kind, _, name = unit.partition(" ")
            if kind == "log":
                part, path = "entry log", self._bookie.logs.path_of(int(name, 16)) or ""
            elif name == "walk":
                part, path = "index", self._data.layout.index
            else:
                part, path = "index files", os.path.join(self._data.layout.index, name)
            verdict = DAMAGE if path in files else SOUND if verified_ms else WAITING
            ago = f"verified {(now - verified_ms) // 60_000} min ago" if verified_ms else "not scrubbed yet"
            result.checks.append(VerifiedPart(part, path, verdict, -1, size, ago))
        yield result.row()

    async def _convert_to_read_only(self, arguments: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        self._bookie.convert_to_read_only(None if arguments.get("undo") else arguments.get("reason", ""))
        yield {
            "bookie_id": self._bookie.cookie.bookie_id,
            "read_only": self._bookie.read_only,
            "read_only_reason": self._bookie.disk_space.reason,
        }


class _RunningData:
    """`BookieData` of a running bookie."""

    def __init__(self, bookie: Bookie) -> None:
        self._bookie = bookie
        self.settings = bookie.settings
        self.files = bookie.components.files
        self.layout = bookie.layout

    @property
    def cookie(self) -> Cookie:
        return self._bookie.cookie

    @property
    def index(self) -> LocationIndex:
        return self._bookie.index

    def logs(self) -> list[LogFile]:
        return [LogFile(info.log_id, info.path, info.bytes) for info in self._bookie.logs.logs()]


class _Warmer:
    """Keeps the page cache ahead of a walk over a file, so that the walk does not wait for the disk."""

    def __init__(self, worker: DiskWorker, path: str, size: int) -> None:
        self._worker = worker
        self._path = path
        self._size = size
        self._warm = 0

    async def reach(self, position: int) -> None:
        """The walk has come to `position`."""
        while self._warm < min(position + 2 * _WARM_BYTES, self._size):
            with contextlib.suppress(MagnetarError):  # the walk reads around what the disk refuses
                await self._worker.warm(self._path, self._warm, min(_WARM_BYTES, self._size - self._warm))
            self._warm += _WARM_BYTES


async def _in_slices(items: Iterator[T]) -> AsyncIterator[T]:
    for number, item in enumerate(items, 1):
        yield item
        if not number % _SLICE_ITEMS:
            await asyncio.sleep(0)


def _released() -> ServiceNotReady:
    return ServiceNotReady("a checkpoint released journal files while they were read; ask again")


def _number(arguments: Mapping[str, str], name: str, default: Any) -> Any:
    text = arguments.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) > _MAX_ID:
        raise InvalidArgument(f"{name} is {text!r}; want a number from 0 to 2^63-1")
    return int(text)
