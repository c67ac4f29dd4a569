"""Sequences: counters in nodes, drawn from by compare-and-set.

All draws that wait in this process are combined into one write. Draws that come while it is under way wait for the next
one, because an id must be greater than every id that was handed out anywhere before it was asked for. Nothing is drawn
in advance.

    draws of 1, 1, 3 wait, the counter is 7 at version 4:  put 12 at version 4  ──> 7, 8, 9
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from magnetar.proto.errors import AlreadyExists, ConnectionLost, FinalError, VersionConflict
from magnetar.runtime.tasks import Jobs

from ..store import Create, Operation, Put, Versioned

SEQUENCES = "/.sequences"
_BYTES = 8


class Sequences:
    """`get` and `commit` are the store's; `commit` without a look for parents that became empty."""

    def __init__(
        self,
        get: Callable[[str], Awaitable[Versioned | None]],
        commit: Callable[[Operation], Awaitable[None]],
    ) -> None:
        self._get = get
        self._commit = commit
        self._waiting: dict[str, list[tuple[int, asyncio.Future[int]]]] = {}
        self._drawing = Jobs("ids of sequences")  # by name
        self._known: dict[str, Versioned] = {}  # what the node was after our newest write

    async def next_id(self, name: str, count: int) -> int:
        """The first of `count` ids."""
        drawn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append((count, drawn))
        self._drawing.begin(name, lambda: self._draw(name))
        return await drawn

    async def close(self) -> None:
        """Ends the draws under way; they raise what the closed store raises."""
        await self._drawing.wait()

    async def _draw(self, name: str) -> None:
        while waiting := self._waiting.pop(name, None):
            wanted = [
                (count, drawn) for count, drawn in waiting if not drawn.done()
            ]  # the others were cancelled
            if not wanted:
                continue
            try:
                first = await self._advance(name, sum(count for count, _ in wanted))
            except Exception as error:
                for _, drawn in wanted:
                    if not drawn.done():
                        drawn.set_exception(error)
                continue
            for count, drawn in wanted:
                if not drawn.done():
                    drawn.set_result(first)
                first += count

    async def _advance(self, name: str, count: int) -> int:
        """Adds to the counter: what it was before. A write whose outcome is not known leaves a gap at most."""
        path = f"{SEQUENCES}/{quote(name, safe='')}"
        while True:
            known = self._known.pop(name, None) or await self._get(path)
            first = 0 if known is None else _decode(path, known.value)
            value = (first + count).to_bytes(_BYTES, "big")
            try:
                if known is None:
                    await self._commit(Create(path, value))
                    self._known[name] = Versioned(value, 0)
                else:
                    await self._commit(Put(path, value, known.version))
                    self._known[name] = Versioned(value, known.version + 1)
            except (AlreadyExists, VersionConflict, ConnectionLost):
                continue
            return first


def _decode(path: str, value: bytes) -> int:
    if len(value) != _BYTES:
        raise FinalError(f"the metadata node {path} is no counter; restore the metadata store", path=path)
    return int.from_bytes(value, "big")
