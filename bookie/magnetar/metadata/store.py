"""The MetadataStore interface: a small tree of versioned values, shared by everything that must agree.

Paths are `/a/b/c`. A node has a value (bytes) and a version, which `create` returns and each `put` raises by one: 0 at
first, more on ZooKeeper if the path was an implied parent. A node that was deleted and made again starts anew. Parents
need not exist: `/a/b/c` implies `/a` and `/a/b`, which are listed by `children` and have no value of their own. All
writes are conditional on versions, so two writers cannot both win:

    await store.create("/topics/orders", b"first")
    node = await store.get("/topics/orders")
    await store.put("/topics/orders", b"second", version=node.version)
    await store.get("/topics/orders")      # Versioned(value=b'second', version=1)
    await store.children("/topics")        # ['orders']

Every write is durable when it returns. After a write failed with StorageFailed its outcome is not known and the store
takes no further writes: the process stops and opens the store again. After ConnectionLost the outcome is not known
either, and the store goes on: the caller reads, and decides.

What a read shows is at least as new as all that this process read or wrote before. That a node is absent, and what
`children` lists, is true of some moment after the call began. A value may be older, by the delay between the store's
servers; a write that is conditional on its version then fails with VersionConflict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from magnetar.proto.errors import InvalidArgument

MAX_PATH_BYTES = 4096
# Below ZooKeeper's default of 1 MiB a packet, so that a value written here fits there too.
MAX_VALUE_BYTES = 1_000_000
_PATH = re.compile(r"(?:/(?!\.\.?(?:/|\Z))[^/\x00-\x1f\ud800-\udfff]+)+")


class Versioned(NamedTuple):
    """A node's value, and the version that the next conditional write names."""

    value: bytes
    version: int


class Create(NamedTuple):
    """Makes a node. AlreadyExists if it is there."""

    path: str
    value: bytes
    session: Session | None = None


class Put(NamedTuple):
    """Replaces a value. VersionConflict unless the node has this version; NotFoundInStore if it was deleted."""

    path: str
    value: bytes
    version: int


class Delete(NamedTuple):
    """Removes a node, whatever its version if `version` is None. VersionConflict, NotFoundInStore, NodeNotEmpty."""

    path: str
    version: int | None = None


class Check(NamedTuple):
    """Changes nothing. VersionConflict unless the node has this version (None: unless it is absent)."""

    path: str
    version: int | None


Operation = Create | Put | Delete | Check


class Watch(Protocol):
    """A registered callback."""

    def close(self) -> None:
        """No call comes after this, not even one already scheduled. May be called again."""


class Session(Protocol):
    """Proof of life of a process: nodes made with it vanish when it ends. They have no nodes below them.

    A session is lost for its owner well before another process can see its nodes vanish: when it cannot be ruled out
    that it will end soon. `lost` is decided by the clock when it is read. So an owner that was stopped for an hour may
    ask before it acts:

        if session.lost:
            stop serving
    """

    @property
    def session_id(self) -> int:
        """Never used twice in the life of a store."""

    @property
    def lost(self) -> bool:
        """Once true, never false again: an owner of something that depends on this session stops at once (rule 31)."""

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Calls back once, from the event loop, when the session ends by anything but `close`."""

    async def close(self) -> None:
        """Deletes the session's nodes; if the store cannot be reached, they go with its timeout. May be called again."""


class MetadataStore(Protocol):
    """What every store offers. Any call may raise StorageFailed or ConnectionLost; after `close` all raise AlreadyClosed."""

    async def get(self, path: str) -> Versioned | None:
        """The node, or None. Parents that are only implied are None too."""

    async def create(self, path: str, value: bytes, *, session: Session | None = None) -> int:
        """Returns the version. AlreadyExists. With a session the node is ephemeral; a lost one: AlreadyClosed."""

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        """Returns the new version. VersionConflict, NotFoundInStore."""

    async def delete(self, path: str, *, version: int | None = None) -> None:
        """VersionConflict, NotFoundInStore, NodeNotEmpty."""

    async def children(self, path: str, *, after: str = "", limit: int = 0) -> list[str]:
        """Names directly below, sorted by their UTF-8 bytes; [] if there are none. "/" is the root.

        Those behind the name `after`, and the first `limit` of them; 0: all. A store that lists ranges does no more
        work than that.
        """

    async def next_id(self, name: str, count: int = 1) -> int:
        """0, 1, 2... per name; never repeats, whatever crashes; a crash may leave a gap. The first of `count` in a row.

        A `count` of 0 draws none, and says which would be next.
        """

    async def commit(self, operations: Sequence[Operation]) -> None:
        """All or nothing, in order, each seeing those before it. The error's detail `index` says which one failed.

        All Creates with a session have the same one. What is written must fit into 1,000,000 bytes altogether.
        """

    def watch(self, path: str, callback: Callable[[str], None]) -> Watch:
        """Calls back with `path` after the node, or its list of children, or a child's value, changed.

        The event loop calls it, never a method of the store. One call may stand for several changes, and a call may
        come without a change: read again, and compare. The watch stays until it is closed. Watch first, then read: no
        change that this read does not show is missed.
        """

    async def open_session(self, timeout_s: float) -> Session:
        """A session that ends when its holder was silent for `timeout_s` seconds, or with its process.

        ZooKeeper's servers bound the timeout by 2 to 20 of their ticks.
        """

    async def close(self) -> None:
        """Ends the sessions of this process, then releases the store. May be called again."""


def split_path(path: str) -> list[str]:
    """The names of `/a/b`. Raises InvalidArgument for what is not an absolute, plain path; "/" has no names."""
    if path == "/":
        return []
    if _PATH.fullmatch(path) is None or len(path.encode()) > MAX_PATH_BYTES:
        raise InvalidArgument(
            f"not a metadata path: {path[:80]!r} (want /name/name, without empty names, . and .., without control "
            f"characters, at most {MAX_PATH_BYTES} bytes)"
        )
    return path.split("/")[1:]
