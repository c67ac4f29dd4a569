"""What a ledger client needs of a bookie in its own process: bookie.Bookie has it, and tests have their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from magnetar.proto.commands import Command


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

    async def answer(self, command: Command) -> tuple[Any, Sequence[bytes]]:
        """Result and payload of what is answered to a request; entries one by one, rows in one piece."""
        ...
