"""Watches over a store's plain connection: persistent and recursive in ZooKeeper, filtered here.

ZooKeeper's recursive watch reports each creation, change and deletion at any depth below a path. A watch of the
interface wants the node, its list of children and its children's values: events of the path and of its children.

The servers forget a connection's watches with the connection. On each new one all are armed again, before anything else
is sent; then each is called once, since changes may have been missed. One that a server refuses is armed again after a
while, and called then. A read that is sent after `watch` returned shows the node as it was when the watch began, or later,
because both go over the same connection in this order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..watch import LoopWatch, WatchList
from . import wire
from .connection import LOST, Answer, Connection
from .namespace import Namespace

_log = logging.getLogger("magnetar.metadata.zookeeper")
_RETRY_S = 5.0


class Watches:
    """All watches of a store. `connection` gives the one that is attached, if there is one."""

    def __init__(self, space: Namespace, connection: Callable[[], Connection | None]) -> None:
        self._space = space
        self._connection = connection
        self._watches = WatchList(self._disarm)

    def add(self, path: str, callback: Callable[[str], None]) -> LoopWatch:
        """Begins to watch; what happens after the next read of the node was sent is not missed."""
        first = path not in self._watches
        watch = self._watches.add(path, callback)
        if first and (connection := self._connection()) is not None:
            self._arm(connection, path, missed=False)
        return watch

    def attached(self, connection: Connection) -> None:
        """A new connection: arms all watches on it."""
        for path in self._watches:
            self._arm(connection, path, missed=True)

    def event(self, full: str) -> None:
        """The server reports a change of this node."""
        path = self._space.relative(full)
        self._watches.notify(path)
        if path != "/":
            self._watches.notify(path.rpartition("/")[0] or "/")

    def close(self) -> None:
        """Ends all of them."""
        self._watches.close()

    def _disarm(self, path: str) -> None:
        if (connection := self._connection()) is not None:
            connection.request(wire.remove_watches(self._space.full(path)))

    def _arm(self, connection: Connection, path: str, *, missed: bool) -> None:
        def armed(answer: asyncio.Future[Answer]) -> None:
            error = LOST if answer.cancelled() else answer.result()[0]
            if error and error != LOST:
                _log.error(
                    "ZooKeeper (3.6 or newer is needed) refuses a watch on %s with error %d; it is asked again in %g s",
                    path, error, _RETRY_S,
                )  # fmt: skip
                asyncio.get_running_loop().call_later(_RETRY_S, self._arm_again, connection, path)
            elif missed and not error:
                self._watches.notify(path)

        connection.request(wire.add_watch(self._space.full(path))).add_done_callback(armed)

    def _arm_again(self, connection: Connection, path: str) -> None:
        if path in self._watches and self._connection() is connection:
            self._arm(connection, path, missed=True)
