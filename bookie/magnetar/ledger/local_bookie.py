"""What a ledger client needs of a bookie in its own process: bookie.Bookie has it, and tests have their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from magnetar.proto.stripe import Stripe


class LocalBookie(Protocol):
    """What is needed of a bookie (bookie.Bookie has it). `add` never calls `done` from within."""

    # Called when `accepting` becomes true again.
    on_accepting: list[Callable[[], None]]

    @property
    def accepting(self) -> bool:
        """False while adds wait for room in its write cache."""
        ...

    @property
    def waits_for_room(self) -> bool:
        """Adds wait for room, and the disk makes progress: the bookie is slow, not hung (rule 21)."""
        ...

    def add(
        self,
        entry: bytes,
        *,
        recovery: bool,
        done: Callable[[int, int, int], None],
        deferred: bool = False,
    ) -> None:
        """Stores an entry. A deferred one is answered with ADD_ACCEPTED as well."""
        ...

    def request_force(self, ledger_id: int) -> None:
        """Deferred adds of the ledger shall become durable."""
        ...

    async def read(
        self, ledger_id: int, first: int, last: int, *, max_bytes: int, fence: bool, stripe: Stripe
    ) -> tuple[list[bytes], int]:
        """Entries and LAC."""
        ...

    async def read_last_confirmed(self, ledger_id: int, *, fence: bool) -> tuple[int, int]:
        """LAC and last entry."""
        ...

    async def write_last_confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Explicit LAC."""
        ...

    async def wait_last_confirmed(
        self, ledger_id: int, last_add_confirmed: int, *, timeout_s: float, max_entries: int, max_bytes: int
    ) -> tuple[int, bool, list[bytes]]:
        """LAC, whether the ledger is fenced, and entries."""
        ...

    async def delete_ledger(self, ledger_id: int) -> None:
        """Drops it."""
        ...

    def list_ledgers(self, after: int, count: int) -> tuple[Sequence[tuple[int, bool, bool, int, int]], bool]:
        """Ledgers, and whether there are more."""
        ...

    async def list_entries(
        self, ledger_id: int, first: int, count: int
    ) -> tuple[Sequence[tuple[int, int]], int]:
        """Ranges, and where to go on."""
        ...

    def info(self) -> dict[str, Any]:
        """Disks, state and load."""
        ...
