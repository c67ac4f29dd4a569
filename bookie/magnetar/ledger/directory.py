"""Which bookies there are, and where.

A bookie's id is what ledger metadata names it by, for good; its address may change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgpack

from magnetar.metadata.store import MetadataStore, Watch
from magnetar.proto.errors import BookieUnavailable, InvalidSetting, MagnetarError

_log = logging.getLogger(__name__)

BOOKIES_PATH = "/bookies"

Address = tuple[str, int]


class BookieDirectory(Protocol):
    """The bookies that are up, as far as is known here; read in the loop, so it answers from memory."""

    def writable(self) -> Sequence[str]:
        """Ids of the bookies that take new entries, sorted."""
        ...

    def address(self, bookie: str) -> Address:
        """Where it listens. BookieUnavailable if nobody knows."""
        ...


def parse_address(text: str) -> Address:
    """`host:port` or `[v6 host]:port`. Raises InvalidSetting."""
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidSetting(f"not a bookie address: {text!r} (want host:port)")
    return host.removeprefix("[").removesuffix("]"), int(port)


class StaticBookies:
    """A list from the settings: ids with addresses, or `host:port` texts that are both."""

    def __init__(self, bookies: Sequence[str] | Mapping[str, Address]) -> None:
        if isinstance(bookies, Mapping):
            self._addresses = {name: bookies[name] for name in sorted(bookies)}
        else:
            self._addresses = {name: parse_address(name) for name in sorted(dict.fromkeys(bookies))}
        self._names = tuple(self._addresses)

    def writable(self) -> Sequence[str]:
        """All of them: whether one is up shows when it is used."""
        return self._names

    def address(self, bookie: str) -> Address:
        """See BookieDirectory."""
        if bookie not in self._addresses:
            raise BookieUnavailable(
                f"bookie {bookie} is not in the list of bookies ({', '.join(self._names)})"
            )
        return self._addresses[bookie]


def encode_registration(address: str, *, read_only: bool = False) -> bytes:
    """The value of a bookie's ephemeral node `/bookies/<id>`."""
    data: bytes = msgpack.packb({"address": address, "read_only": read_only})
    return data


class RegisteredBookies:
    """The bookies registered under /bookies in the metadata store, kept up to date by a watch."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._addresses: dict[str, Address] = {}
        self._writable: tuple[str, ...] = ()
        self._watch: Watch | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, metadata: MetadataStore) -> RegisteredBookies:
        """Reads the list and follows it from then on."""
        directory = cls(metadata)
        directory._watch = metadata.watch(BOOKIES_PATH, lambda _: directory._changed.set())
        await directory._read()
        directory._task = asyncio.get_running_loop().create_task(directory._follow(), name="bookie directory")
        return directory

    def writable(self) -> Sequence[str]:
        """See BookieDirectory."""
        return self._writable

    def address(self, bookie: str) -> Address:
        """See BookieDirectory. A bookie that vanished keeps its last address: it may be back before its node is."""
        if bookie not in self._addresses:
            raise BookieUnavailable(f"bookie {bookie} is not registered")
        return self._addresses[bookie]

    async def close(self) -> None:
        """Stops following."""
        if self._watch is not None:
            self._watch.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._read()
            except MagnetarError as error:
                if not error.retryable:
                    return  # the store is closed or failed: whoever owns it stops this process
                await asyncio.sleep(1)
                self._changed.set()

    async def _read(self) -> None:
        writable = []
        for name in await self._metadata.children(BOOKIES_PATH):
            node = await self._metadata.get(f"{BOOKIES_PATH}/{name}")
            if node is None:
                continue
            try:
                fields = msgpack.unpackb(node.value)
                self._addresses[name] = parse_address(fields["address"])
                read_only = bool(fields.get("read_only", False))
            except (ValueError, TypeError, KeyError, AttributeError, InvalidSetting) as error:
                _log.warning("the registration of bookie %s cannot be read: %r", name, error)
                continue
            if not read_only:
                writable.append(name)
        self._writable = tuple(writable)
