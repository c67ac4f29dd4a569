"""LedgerManager: the records of all ledgers, by their ids.

A record is the encoded `magnetar.ledger` metadata of a ledger; this room does not look into it. In the tree of a
MetadataStore the records stand in pages of `LEDGERS_PER_PAGE` ids, so that no list of children is ever long: a million
ledgers are a thousand pages, and each is listed in 1 ms of the loop, in one small packet of ZooKeeper's.

    /ledgers/<id // 1,000, 16 digits>/<id % 1,000, 3 digits>     ledger 1,234,567: /ledgers/0000000000001234/567
    /deleted/<bookie>/<id, 20 digits>                              a deletion that the bookie has not confirmed yet

Ids come from one sequence of the store: they rise over all processes, so a topic's ledgers are in order whoever owns it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Protocol

from magnetar.proto.errors import FinalError, NotFoundInStore

from .store import Create, Delete, MetadataStore, Versioned, Watch

LEDGERS_PATH: Final = "/ledgers"
LEDGERS_PER_PAGE: Final = 1_000
_PAGE_DIGITS = 16
_DIGITS = 3
_SEQUENCE = "ledgers"
_DELETED_PATH = "/deleted"


class LedgerManager(Protocol):
    """What a client of ledgers needs of metadata. Any call may raise what MetadataStore's raise."""

    async def new_ids(self, count: int = 1) -> int:
        """The first of `count` ids in a row that no ledger had; no later call anywhere returns lower ones."""

    async def create(self, ledger_id: int, record: bytes) -> int:
        """Returns the version. AlreadyExists."""

    async def get(self, ledger_id: int) -> Versioned | None:
        """The record; None if there is no such ledger."""

    async def put(self, ledger_id: int, record: bytes, *, version: int) -> int:
        """Compare-and-set: returns the new version. VersionConflict, NotFoundInStore."""

    async def delete(self, ledger_id: int, *, remember_for: Sequence[str] = ()) -> None:
        """NotFoundInStore. In the same commit, a note for each of these bookies that it has to delete its entries."""

    async def bookies_to_delete(self) -> list[str]:
        """Bookies for which deletions are noted; perhaps some without any."""

    async def noted_deletions(self, bookie: str, *, after: int = -1, limit: int) -> list[int]:
        """Deleted ledgers above `after` that the bookie has not confirmed yet, rising."""

    async def forget_deletions(self, ledger_id: int, bookies: Sequence[str]) -> None:
        """These bookies have confirmed the deletion. Without notes it does nothing."""

    def watch(self, ledger_id: int, callback: Callable[[], None]) -> Watch:
        """Calls back from the event loop after the record changed; perhaps without a change, once for several."""


class StoredLedgers:
    """LedgerManager over a MetadataStore, which its maker owns; also lists what there is."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def new_ids(self, count: int = 1) -> int:
        return await self._store.next_id(_SEQUENCE, count)

    async def next_id(self) -> int:
        """The id that the next ledger would get; draws none. No id from here on was ever used in this store."""
        return await self._store.next_id(_SEQUENCE, 0)

    async def create(self, ledger_id: int, record: bytes) -> int:
        return await self._store.create(ledger_path(ledger_id), record)

    async def get(self, ledger_id: int) -> Versioned | None:
        return await self._store.get(ledger_path(ledger_id))

    async def put(self, ledger_id: int, record: bytes, *, version: int) -> int:
        return await self._store.put(ledger_path(ledger_id), record, version=version)

    async def delete(self, ledger_id: int, *, remember_for: Sequence[str] = ()) -> None:
        notes = [Create(_note_path(bookie, ledger_id), b"") for bookie in remember_for]
        await self._store.commit([Delete(ledger_path(ledger_id)), *notes])

    async def bookies_to_delete(self) -> list[str]:
        return await self._store.children(_DELETED_PATH)

    async def noted_deletions(self, bookie: str, *, after: int = -1, limit: int) -> list[int]:
        behind = "" if after < 0 else _note_name(after)
        names = await self._store.children(f"{_DELETED_PATH}/{bookie}", after=behind, limit=limit)
        return [int(name) for name in names if name.isdecimal()]

    async def forget_deletions(self, ledger_id: int, bookies: Sequence[str]) -> None:
        for bookie in bookies:
            with contextlib.suppress(NotFoundInStore):  # another process has sent it, too
                await self._store.delete(_note_path(bookie, ledger_id))

    def watch(self, ledger_id: int, callback: Callable[[], None]) -> Watch:
        return self._store.watch(ledger_path(ledger_id), lambda _: callback())

    async def page_starts(self) -> list[int]:
        """The lowest id that each page can have, rising. FinalError for a name that is none of ours."""
        return [
            _ledger(f"{LEDGERS_PATH}/{name}/{0:0{_DIGITS}d}")
            for name in await self._store.children(LEDGERS_PATH)
        ]

    async def page(self, start: int) -> list[int]:
        """The ledgers from `start`, which begins a page, to its end, rising. FinalError for a name that is none of ours."""
        folder = ledger_path(start).rpartition("/")[0]
        names = await self._store.children(folder)
        # A page in 0.2 ms; the one-by-one form, which finds the name that is none, takes 1.5.
        if (
            all(map(str.isdecimal, names))
            and "".join(names).isascii()
            and all(len(n) == _DIGITS for n in names)
        ):
            return [start + int(name) for name in names]
        return [_ledger(f"{folder}/{name}") for name in names]

    async def pages(self) -> AsyncIterator[list[int]]:
        """All ledgers, rising, up to LEDGERS_PER_PAGE at a time."""
        for start in await self.page_starts():
            if page := await self.page(start):
                yield page

    async def any(self) -> bool:
        """Whether there is a ledger."""
        async for _ in self.pages():
            return True
        return False


def ledger_path(ledger_id: int) -> str:
    """The node of a ledger's record."""
    page, number = divmod(ledger_id, LEDGERS_PER_PAGE)
    return f"{LEDGERS_PATH}/{page:0{_PAGE_DIGITS}d}/{number:0{_DIGITS}d}"


def ledger_of_path(path: str) -> int | None:
    """The ledger whose record stands at this path; None if none does."""
    root, _, name = path.rpartition("/")
    parent, _, page = root.rpartition("/")
    if parent != LEDGERS_PATH or len(page) != _PAGE_DIGITS or len(name) != _DIGITS:
        return None
    digits = page + name
    return int(digits) if digits.isascii() and digits.isdigit() else None


def _ledger(path: str) -> int:
    ledger_id = ledger_of_path(path)
    if ledger_id is None:
        raise FinalError(
            f"{path} is not a path that this release gives to a ledger, so the list of ledgers is not known: "
            "a later release wrote this metadata; upgrade this process"
        )
    return ledger_id


def _note_name(ledger_id: int) -> str:
    return f"{ledger_id:020d}"


def _note_path(bookie: str, ledger_id: int) -> str:
    return f"{_DELETED_PATH}/{bookie}/{_note_name(ledger_id)}"
