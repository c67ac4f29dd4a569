"""The queue of under-replicated ledgers in the metadata store, and the locks of those who repair.

    /underreplicated/<page>/<number>    msgpack map (`core.request`); pages as those of /ledgers (`metadata.ledgers`)
    /repairing/<ledger, 20 digits>      lock, ephemeral: its value is the name of the process that repairs the ledger

A request says which bookies have to be looked at, and why; `placement` asks for ensembles that the policy allows. It is no
proof: whoever repairs reads the ledger's record first. `note` says why the last attempt did not succeed, for people.
Everybody adds by compare-and-set, and the worker removes a request under the version that it served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from magnetar.metadata.ledgers import LEDGERS_PATH, ledger_of_path, ledger_path
from magnetar.metadata.store import MetadataStore, Session
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFoundInStore,
    VersionConflict,
)

from .core.request import Request

UNDERREPLICATED_PATH: Final = "/underreplicated"
LOCKS_PATH: Final = "/repairing"
_MAX_CONFLICTS = 100
_MAX_NOTE = 1000


class RepairQueue:
    """The queue and its locks. Each call raises what the store raises."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def add(self, ledger_id: int, request: Request) -> bool:
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

    async def get(self, ledger_id: int) -> tuple[Request, int] | None:
        """The request and its version. InvalidArgument, which names the path, for one that cannot be read."""
        path = _path(ledger_id)
        node = await self._store.get(path)
        return None if node is None else (_decode(path, node.value), node.version)

    async def write_note(self, ledger_id: int, request: Request, version: int, note: str) -> None:
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


def _decode(path: str, value: bytes) -> Request:
    try:
        return Request.decode(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from error


def _path(ledger_id: int) -> str:
    return UNDERREPLICATED_PATH + ledger_path(ledger_id).removeprefix(LEDGERS_PATH)


def _lock_path(ledger_id: int) -> str:
    return f"{LOCKS_PATH}/{ledger_id:020d}"


def _lock_value(session: Session, owner: str) -> bytes:
    return f"{owner} {session.session_id}".encode()
