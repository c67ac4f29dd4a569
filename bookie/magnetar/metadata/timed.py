"""A timeout for every call of a metadata store."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from magnetar.proto.errors import RequestTimeout

from .store import MetadataStore, Operation, Session, Versioned

T = TypeVar("T")


async def metadata_in_time(work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
    """The result, or RequestTimeout, which names the setting. Whether it was done then is not known."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await work
    except TimeoutError:
        if not deadline.expired():
            raise  # the store's own
        raise RequestTimeout(
            f"the metadata store did not answer within metadata_timeout_s={timeout_s:g} s ({what}); whether it did it is "
            "not known"
        ) from None


class TimedStore:
    """A MetadataStore over another one, which its maker owns: a call that is not answered in time raises RequestTimeout.

    What such a call asked for may be done, or may be done still.
    """

    def __init__(self, store: MetadataStore, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self.watch = store.watch
        self.close = store.close

    async def get(self, path: str) -> Versioned | None:
        return await self._in_time(self._store.get(path), path)

    async def create(self, path: str, value: bytes, *, session: Session | None = None) -> int:
        return await self._in_time(self._store.create(path, value, session=session), path)

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        return await self._in_time(self._store.put(path, value, version=version), path)

    async def delete(self, path: str, *, version: int | None = None) -> None:
        await self._in_time(self._store.delete(path, version=version), path)

    async def children(self, path: str, *, after: str = "", limit: int = 0) -> list[str]:
        return await self._in_time(
            self._store.children(path, after=after, limit=limit), f"names under {path}"
        )

    async def next_id(self, name: str, count: int = 1) -> int:
        return await self._in_time(self._store.next_id(name, count), f"the next id of {name}")

    async def commit(self, operations: Sequence[Operation]) -> None:
        await self._in_time(self._store.commit(operations), operations[0].path if operations else "nothing")

    async def open_session(self, timeout_s: float) -> Session:
        return await self._in_time(self._store.open_session(timeout_s), "a session")

    async def _in_time(self, work: Coroutine[Any, Any, T], what: str) -> T:
        return await metadata_in_time(work, self._timeout_s, what)
