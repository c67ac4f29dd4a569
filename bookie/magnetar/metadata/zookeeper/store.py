"""The metadata store on ZooKeeper.

    store = await open_zookeeper_store("zk://a:2181,b:2181,c:2181/magnetar", rng=rng, clock=monotonic_s)

Reads may be answered by any server. They show at least what this process has read or written before, over whichever of
its sessions, and a node or a listing is only reported as absent or complete as it was when the call was made: the
leader is asked for what is missing first (`sync`). A value that is present may be outdated by the servers' delay;
writes are conditional on its version.

A read whose answer was lost is sent again. A write is not: ConnectionLost says that its outcome is not known. A request
waits for a connection for `request_timeout_s`; ConnectionLost says then that nothing was sent.
"""

from __future__ import annotations

import asyncio
import bisect
import random
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magnetar.proto.errors import (
    AlreadyClosed,
    ConnectionLost,
    InvalidArgument,
    InvalidSetting,
    MagnetarError,
    NotAuthorized,
    ServiceNotReady,
)

from ..store import Create, Delete, Operation, Put, Session, Versioned, split_path
from ..watch import LoopWatch
from . import wire
from .address import SETTING, ZooKeeperAddress, parse_address
from .commits import answer_error, commit, prune_parents
from .connection import LOST, MAX_PENDING, Connection
from .namespace import Namespace
from .sequences import SEQUENCES, Sequences
from .session import Servers, ZooKeeperSession
from .watches import Watches
from .wire import Request, ZooKeeperError

_READ_ATTEMPTS = 5
_MAX_PAGED = 8  # lists
_RESERVED = {SEQUENCES[1:], "zookeeper"}  # below the root; the second is ZooKeeper's own


@dataclass(frozen=True, slots=True)
class ZooKeeperSettings:
    """Times of the store. The sessions of `open_session` have timeouts of their own."""

    session_timeout_s: float = 15.0  # of the session for plain reads and writes, which nothing depends on
    open_timeout_s: float = 10.0  # for the first connection
    request_timeout_s: float = 30.0  # how long a request waits for a connection


async def open_zookeeper_store(
    address: str,
    *,
    rng: random.Random,
    clock: Callable[[], float],
    tls: ssl.SSLContext | None = None,
    settings: ZooKeeperSettings | None = None,
    make_root: bool = False,
) -> ZooKeeperMetadataStore:
    """Connects, and looks whether the root is there (`make_root`: makes it).

    `clock` counts seconds and goes on while the machine sleeps; `tls` replaces the system's certificates for zk+tls.
    Raises InvalidSetting when an operator must change something, ServiceNotReady when no server answers.
    """
    parsed = parse_address(address)
    store = ZooKeeperMetadataStore(
        parsed, rng=rng, clock=clock, tls=tls, settings=settings or ZooKeeperSettings()
    )
    try:
        await store.open(make_root=make_root)
    except (Exception, asyncio.CancelledError):
        await store.close()
        raise
    return store


class ZooKeeperMetadataStore:
    """MetadataStore on an ensemble of ZooKeeper servers; `open_zookeeper_store` makes it."""

    def __init__(
        self,
        address: ZooKeeperAddress,
        *,
        rng: random.Random,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None,
        settings: ZooKeeperSettings,
    ) -> None:
        self._address = address
        self._settings = settings
        if address.tls and tls is None:
            tls = ssl.create_default_context()
        hosts = list(address.hosts)
        rng.shuffle(hosts)
        self._servers = Servers(hosts, address.credentials, tls if address.tls else None, clock, rng.random)
        self._space = Namespace(address.root, private=address.credentials is not None)
        self._watches = Watches(self._space, lambda: self._main.connection)
        self._sequences = Sequences(self.get, self._advance_sequence)
        self._sessions: dict[ZooKeeperSession, None] = {}  # those of open_session; some may have ended
        self._closed = False
        # By path that is read in pages: the zxid of its list, and the names in order.
        self._paged: dict[str, tuple[int, list[str]]] = {}
        self._main = self._start_main()

    async def open(self, *, make_root: bool) -> None:
        """`open_zookeeper_store` calls it."""
        try:
            async with asyncio.timeout(self._settings.open_timeout_s):
                connection = await self._attached()
        except (TimeoutError, ConnectionLost):
            raise self._unreachable() from None
        if make_root:
            await self._make_root(connection)
        try:
            error, _ = await self._read(wire.get_data(self._space.full("/")), "/", fresh=True)
        except NotAuthorized:
            raise InvalidSetting(
                f"setting {SETTING}: {self._address} refuses its root {self._space.full('/')} to these credentials; "
                "want zk://user:password@host:port/root",
                setting=SETTING,
            ) from None
        if error:
            raise InvalidSetting(
                f"setting {SETTING}: {self._address} has no node {self._space.root}; "
                "correct the root, or make it: magnetar cluster init",
                setting=SETTING,
            )

    async def get(self, path: str) -> Versioned | None:
        if not split_path(path):
            raise InvalidArgument("the root / has no value; name a node below it")
        request = wire.get_data(self._space.full(path))
        error, frame = await self._read(request, path)
        if error == ZooKeeperError.NO_NODE:
            error, frame = await self._read(request, path, fresh=True)
        if error:
            return None
        value, version = wire.decode_data(frame)
        return None if value is None else Versioned(value, version)

    async def create(self, path: str, value: bytes, *, session: Session | None = None) -> int:
        return (await self._commit([Create(path, value, session)]))[0]

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        await self._commit([Put(path, value, version)])
        return version + 1

    async def delete(self, path: str, *, version: int | None = None) -> None:
        await self.commit([Delete(path, version)])

    async def children(self, path: str, *, after: str = "", limit: int = 0) -> list[str]:
        """See MetadataStore. ZooKeeper sends all names, whatever the range: pages behind the first are of one answer."""
        split_path(path)
        names = await self._page_names(path) if after and limit else await self._names(path)
        first = bisect.bisect_right(names, after) if after else 0
        if limit and first + limit > len(names):
            self._paged.pop(path, None)
        return names[first : first + limit if limit else None]

    async def _names(self, path: str) -> list[str]:
        error, frame = await self._read(wire.get_children(self._space.full(path)), path, fresh=True)
        if error:
            return []
        # About 2 us for each. The order of code points is that of UTF-8.
        names = sorted(map(self._space.name, wire.decode_children(frame)))
        return names if path != "/" else [name for name in names if name not in _RESERVED]

    async def _page_names(self, path: str) -> list[str]:
        """As they are now: those of the page before, unless a child was made or deleted since."""
        error, frame = await self._read(wire.exists(self._space.full(path)), path, fresh=True)
        if error:
            return []
        zxid = wire.decode_stat(frame).children_zxid  # before the names: newer ones are only read once more
        known = self._paged.pop(path, None)
        if known is None or known[0] != zxid:
            known = zxid, await self._names(path)
        self._paged[path] = known
        if len(self._paged) > _MAX_PAGED:
            del self._paged[next(iter(self._paged))]
        return known[1]

    async def next_id(self, name: str, count: int = 1) -> int:
        self._check_open()
        if not name or name < " ":
            raise InvalidArgument(f"not the name of a sequence: {name!r}")
        return await self._sequences.next_id(name, count)

    async def commit(self, operations: Sequence[Operation]) -> None:
        """See MetadataStore. All Creates that have a session must have the same one, to which the multi belongs."""
        await self._commit(operations)

    def watch(self, path: str, callback: Callable[[str], None]) -> LoopWatch:
        self._check_open()
        split_path(path)
        return self._watches.add(path, callback)

    async def open_session(self, timeout_s: float) -> ZooKeeperSession:
        """See MetadataStore. The servers bound the timeout; `timeout_s` of the session is what they granted."""
        self._check_open()
        session = ZooKeeperSession(self._servers, timeout_s)
        self._sessions = {other: None for other in self._sessions if other.usable} | {session: None}
        session.start()
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                await session.attached()
        except (Exception, asyncio.CancelledError) as error:
            await session.close()
            if isinstance(error, TimeoutError):
                raise self._not_connected() from None
            if isinstance(error, AlreadyClosed):
                self._check_open()
                raise ConnectionLost(
                    "the metadata session ended before it could be used; try again"
                ) from None
            raise
        return session

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._watches.close()
        await asyncio.gather(*[session.close() for session in [*self._sessions, self._main]])
        await self._sequences.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise AlreadyClosed("the metadata store is closed")

    def _start_main(self) -> ZooKeeperSession:
        main = ZooKeeperSession(
            self._servers,
            self._settings.session_timeout_s,
            on_attached=self._watches.attached,
            on_event=self._watches.event,
            on_ended=self._replace_main,
        )
        main.start()
        return main

    def _replace_main(self) -> None:
        if not self._closed:
            self._main = self._start_main()

    async def _attached(self) -> Connection:
        """The connection for plain requests, when it has room for one."""
        self._check_open()
        connection = self._main.connection
        if connection is not None and connection.pending < MAX_PENDING:
            return connection
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                while True:
                    main = self._main
                    try:
                        return await main.attached()
                    except AlreadyClosed:  # it ended, and `_replace_main` began another
                        self._check_open()
                        assert self._main is not main
        except TimeoutError:
            raise self._not_connected() from None

    async def _read(self, request: Request, path: str, *, fresh: bool = False) -> tuple[int, bytes]:
        """The answer, or NO_NODE. `fresh`: of what the leader knows now."""
        answer = (LOST, b"")
        for _ in range(_READ_ATTEMPTS):
            connection = self._main.connection
            if connection is None or connection.pending >= MAX_PENDING:
                connection = await self._attached()
            if fresh or connection.zxid < self._servers.progress.zxid:
                connection.request(wire.sync("/"))
            answer = await connection.request(request)
            if not answer[0] or answer[0] == ZooKeeperError.NO_NODE:
                return answer
            if answer[0] != LOST:
                break
        self._check_open()
        raise answer_error(answer[0], path)

    def _session_of(self, operations: Sequence[Operation]) -> ZooKeeperSession | None:
        self._check_open()
        found: ZooKeeperSession | None = None
        for index, operation in enumerate(operations):
            if not isinstance(operation, Create) or operation.session is None:
                continue
            session = operation.session
            if not isinstance(session, ZooKeeperSession) or session.servers is not self._servers:
                raise InvalidArgument("this session is none of this store's", index=index)
            if not session.usable:
                error = session.ended_error()
                error.details["index"] = index
                raise error
            if found not in (None, session):
                raise InvalidArgument("a commit on ZooKeeper makes nodes of one session only", index=index)
            found = session
        return found

    async def _commit(self, operations: Sequence[Operation]) -> list[int]:
        """Versions that the nodes of Creates have."""
        session = self._session_of(operations)
        if session is None:
            connection = await self._attached()
        else:
            connection = await session.attached()
        versions = await commit(connection, operations, self._space)
        if deleted := [operation.path for operation in operations if isinstance(operation, Delete)]:
            await prune_parents(connection, deleted, self._space)
        return versions

    async def _advance_sequence(self, operation: Operation) -> None:
        await commit(await self._attached(), [operation], self._space)

    async def _make_root(self, connection: Connection) -> None:
        names = split_path(self._space.root or "/")
        for depth in range(1, len(names) + 1):
            path = "/" + "/".join(names[:depth])
            # Only the root itself is private: others may have their own below the nodes that lead to it.
            private = self._space.private and depth == len(names)
            error, _ = await connection.request(wire.create(path, b"", private=private))
            if error and error != ZooKeeperError.NODE_EXISTS:
                raise answer_error(error, path)

    def _failures(self) -> str:
        reasons = self._servers.failures
        return "; ".join(
            f"{self._servers.host_name(number)}: {reasons.get(number, 'no answer yet')}"
            for number in range(len(self._servers.hosts))
        )

    def _not_connected(self) -> ConnectionLost:
        return ConnectionLost(
            f"no ZooKeeper server of {self._address} can be reached, nothing was sent ({self._failures()})"
        )

    def _unreachable(self) -> MagnetarError:
        reasons = self._servers.failures
        problem = (
            f"setting {SETTING}: no ZooKeeper server of {self._address} can be used ({self._failures()})"
        )
        if len(reasons) == len(self._servers.hosts) and all(
            "not ZooKeeper" in reason for reason in reasons.values()
        ):
            return InvalidSetting(problem, setting=SETTING)
        return ServiceNotReady(problem + "; start one, or correct the setting", setting=SETTING)
