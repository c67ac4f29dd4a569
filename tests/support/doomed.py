"""A broker that dies at a chosen call to the metadata store, before or after the call took effect."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from magnetar.ledger import LedgerClient, LedgerSettings, LocalTransport, StaticBookies
from magnetar.metadata.ledgers import StoredLedgers
from support.bookies import Bookies
from support.broker_kit import settle

WRITES = ("create", "put", "delete", "next_id", "commit")


class Doomed:
    """A metadata store whose process dies at the n-th write from `arm` on: that call and all later ones never return."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.dead = asyncio.Event()
        self.left: int | None = None
        self.takes_effect = False
        self.calls: list[str] = []

    def arm(self, left: int, *, takes_effect: bool) -> None:
        self.left, self.takes_effect = left, takes_effect

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.store, name)
        if name not in (*WRITES, "get", "children"):
            return target

        async def call(*args: Any, **named: Any) -> Any:
            if self.dead.is_set():
                await asyncio.get_running_loop().create_future()
            if name in WRITES and self.left is not None:
                self.calls.append(f"{name} {args[0]}")
                self.left -= 1
                if self.left < 0:
                    self.dead.set()
                    if self.takes_effect:
                        await target(*args, **named)
                    await asyncio.get_running_loop().create_future()
            return await target(*args, **named)

        return call


def ledger_client(bookies: Bookies, metadata: Any) -> LedgerClient:
    directory = StaticBookies(dict.fromkeys(bookies, ("127.0.0.1", 1)))
    transport = LocalTransport(bookies)
    return LedgerClient(
        StoredLedgers(metadata), transport, directory, LedgerSettings(), random.Random(3), bookies.clock
    )


async def kill(others: set[asyncio.Task[Any]]) -> None:
    """Ends every task that the dead broker, and who talked to it, left behind."""
    mine = asyncio.all_tasks() - others
    for task in mine:
        task.cancel()
    await asyncio.wait(mine, timeout=5)


async def until_dead(doomed: Doomed, work: asyncio.Future[Any]) -> bool:
    """True if it died; False if the work was done before."""
    death = asyncio.ensure_future(doomed.dead.wait())
    await asyncio.wait([death, work], return_when=asyncio.FIRST_COMPLETED, timeout=10)
    died = doomed.dead.is_set()
    if not died:
        await settle()  # what goes on behind the answer
        died = doomed.dead.is_set()
    death.cancel()
    return died
