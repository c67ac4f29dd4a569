"""The queue of under-replicated ledgers in the metadata store, the locks of those who repair, and what is next.

    /underreplicated/<page>/<number>    msgpack map (`core.request`); pages as those of /ledgers (`metadata.ledgers`)
    /repairing/<ledger, 20 digits>      lock, ephemeral: its value is the name of the process that repairs the ledger

A request says which bookies have to be looked at, and why; `placement` asks for ensembles that the policy allows. It is no
proof: whoever repairs reads the ledger's record first. `note` says why the last attempt did not succeed, for people.
Everybody adds by compare-and-set, and the worker removes a request under the version that it served.

`WorkList` goes through the queue, and then the reports of damage, once in each round, in an order of its own for each
process, so that workers seldom meet at the same lock. Only one page is in memory. A ledger that was postponed by this
process is left out until its time has come.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final, NamedTuple

from magnetar.metadata.damage import DAMAGED_PATH
from magnetar.metadata.ledgers import LEDGERS_PATH, ledger_of_path, ledger_path
from magnetar.metadata.store import MetadataStore, Session
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFoundInStore,
    VersionConflict,
)

from .core.request import RepairRequest

UNDERREPLICATED_PATH: Final = "/underreplicated"
LOCKS_PATH: Final = "/repairing"
_MAX_CONFLICTS = 100
_MAX_NOTE = 1000
_PAGE = 1000
# Ledgers whose back-off is remembered; others are tried once in every round.
_MAX_POSTPONED = 100_000


class UnderreplicatedLedgers:
    """The queue and its locks. Each call raises what the store raises."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def add(self, ledger_id: int, request: RepairRequest) -> bool:
        """The queue asks for this, durably, when this returns; False if it did so before.

        InvalidArgument, which names the path, if a request is there that cannot be read; it stays as it is.
        """
        path = _path(ledger_id)
        for _ in range(_MAX_CONFLICTS):
            node = await self._store.get(path)
            try:
                if node is None:
                    await self._store.create(path, request.encode())
                    return True
                known = _decode(path, node.value)
                merged = known.merged(request)
                if merged is known:
                    return False
                await self._store.put(path, merged.encode(), version=node.version)
            except (VersionConflict, AlreadyExists, NotFoundInStore):
                continue  # somebody else queued it, or repaired it, at the same time
            return True
        raise VersionConflict(f"{path} was changed by others {_MAX_CONFLICTS} times in a row")

    async def get(self, ledger_id: int) -> tuple[RepairRequest, int] | None:
        """The request and its version. InvalidArgument, which names the path, for one that cannot be read."""
        path = _path(ledger_id)
        node = await self._store.get(path)
        return None if node is None else (_decode(path, node.value), node.version)

    async def write_note(self, ledger_id: int, request: RepairRequest, version: int, note: str) -> None:
        """Says why the ledger is still in the queue. Another change of the request wins."""
        note = note[:_MAX_NOTE]
        if note != request.note:
            value = replace(request, note=note).encode()
            try:
                await self._store.put(_path(ledger_id), value, version=version)
            except (VersionConflict, NotFoundInStore):
                return

    async def remove(self, ledger_id: int, version: int) -> bool:
        """False if more was asked for meanwhile: look again."""
        try:
            await self._store.delete(_path(ledger_id), version=version)
        except VersionConflict:
            return False
        except NotFoundInStore:
            return True
        return True

    async def pages(self) -> list[str]:
        """Names of the pages that have requests, for `ledgers`."""
        return await self._store.children(UNDERREPLICATED_PATH)

    async def ledgers(self, page: str) -> list[int]:
        """The ledgers of one page, rising; a page has 1,000 at most. A name that is none of ours is left out."""
        folder = f"{UNDERREPLICATED_PATH}/{page}"
        names = await self._store.children(folder)
        found = (ledger_of_path(f"{LEDGERS_PATH}/{page}/{name}") for name in names)
        return [ledger_id for ledger_id in found if ledger_id is not None]

    async def count(self, most_pages: int = 0) -> int:
        """How many wait; of the first `most_pages` pages (0: of all)."""
        return sum([len(await self.ledgers(page)) for page in (await self.pages())[: most_pages or None]])

    async def worker(self, ledger_id: int) -> str:
        """The process that repairs the ledger now; "": none does."""
        node = await self._store.get(_lock_path(ledger_id))
        return "" if node is None else node.value.decode("utf-8", "replace").rpartition(" ")[0]

    async def lock(self, ledger_id: int, session: Session, owner: str) -> bool:
        """Takes the lock of a ledger for as long as the session lives; False if somebody else has it."""
        value = _lock_value(session, owner)
        try:
            await self._store.create(_lock_path(ledger_id), value, session=session)
        except AlreadyExists:
            return False
        return True

    async def unlock(self, ledger_id: int, session: Session, owner: str) -> None:
        """Gives the lock back; one that the session lost, and another process took, stays."""
        path = _lock_path(ledger_id)
        node = await self._store.get(path)
        if node is not None and node.value == _lock_value(session, owner):
            try:
                await self._store.delete(path, version=node.version)
            except (NotFoundInStore, VersionConflict):
                return


class Task(NamedTuple):
    """One thing to repair. `damaged`: the bookie whose copies are reported; "": the queue of under-replicated ledgers."""

    ledger_id: int
    damaged: str = ""


class _Postponed(NamedTuple):
    until_s: float
    attempts: int


class WorkList:
    """Shared by the workers of a process."""

    def __init__(
        self,
        store: MetadataStore,
        queue: UnderreplicatedLedgers,
        rng: random.Random,
        backoff_s: float,
        backoff_max_s: float,
    ) -> None:
        self._store = store
        self._queue = queue
        self._rng = rng
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._postponed: dict[Task, _Postponed] = {}
        # Of the round that runs and of the last one that ended: ledgers in the queue, reports of damage.
        self._counting = [0, 0]
        self.queued_ledgers = 0
        self.damaged_ledgers = 0

    async def round(self) -> AsyncIterator[Task]:
        """Everything that can be tried now, once. Raises what the store raises."""
        self._counting = [0, 0]
        async for task in self._all():
            self._counting[bool(task.damaged)] += 1
            if self._is_due(task):
                yield task
        self.queued_ledgers, self.damaged_ledgers = self._counting

    def done(self, task: Task) -> None:
        """It needs no repair any more, or its next attempt is a new one."""
        self._postponed.pop(task, None)

    def postpone(self, task: Task, until_s: float | None = None) -> None:
        """Not again before `until_s` (loop time); None: after a pause that doubles with each attempt."""
        before = self._postponed.pop(task, None)
        attempts = 0 if before is None else before.attempts
        if until_s is None:
            pause_s = min(self._backoff_s * 2.0 ** min(attempts, 30), self._backoff_max_s)
            until_s = asyncio.get_running_loop().time() + pause_s
            attempts += 1
        if len(self._postponed) < _MAX_POSTPONED:
            self._postponed[task] = _Postponed(until_s, attempts)

    def forget_postponed(self) -> None:
        """The cluster changed: what could not be done may be possible now."""
        self._postponed.clear()

    @property
    def postponed(self) -> int:
        """Tasks that wait for their next attempt."""
        return len(self._postponed)

    def next_due_s(self, after_s: float) -> float:
        """Loop time of the first attempt that is due after the round that began at `after_s`; inf: none is."""
        due = (postponed.until_s for postponed in self._postponed.values())
        return min((until_s for until_s in due if until_s > after_s), default=float("inf"))

    def _is_due(self, task: Task) -> bool:
        known = self._postponed.get(task)
        return known is None or known.until_s <= asyncio.get_running_loop().time()

    async def _all(self) -> AsyncIterator[Task]:
        pages = await self._queue.pages()
        self._rng.shuffle(pages)
        for page in pages:
            ledgers = await self._queue.ledgers(page)
            self._rng.shuffle(ledgers)
            for number, ledger_id in enumerate(ledgers, 1):
                if number % _PAGE == 0:
                    await asyncio.sleep(0)
                yield Task(ledger_id)
        for bookie in await self._store.children(DAMAGED_PATH):
            folder, after = f"{DAMAGED_PATH}/{bookie}", ""
            while names := await self._store.children(folder, after=after, limit=_PAGE):
                after = names[-1]
                for name in names:
                    if name.isascii() and name.isdigit():
                        yield Task(int(name), bookie)


def _decode(path: str, value: bytes) -> RepairRequest:
    try:
        return RepairRequest.decode(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from error


def _path(ledger_id: int) -> str:
    return UNDERREPLICATED_PATH + ledger_path(ledger_id).removeprefix(LEDGERS_PATH)


def _lock_path(ledger_id: int) -> str:
    return f"{LOCKS_PATH}/{ledger_id:020d}"


def _lock_value(session: Session, owner: str) -> bytes:
    return f"{owner} {session.session_id}".encode()
