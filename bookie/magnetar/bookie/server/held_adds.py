"""Connections whose adds wait for room in the write cache: not read meanwhile, and told that the bookie is alive.

A ledger client takes a bookie that is silent for its add timeout for hung (rule 21). One whose write cache is full works
as fast as its disk does, and says so: an AddDone without rows, twice a second. It says nothing when a journal does not move
although it has something to sync: then the disk hangs, and rule 21 is right.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ..engine import Bookie

__all__ = ["NOTICE_INTERVAL_S", "HeldAdds"]

# Add timeouts are seconds.
NOTICE_INTERVAL_S = 0.5


class _Holder(Protocol):
    def adds_held(self) -> None:
        """Tell the peer that its adds wait."""
        ...

    def adds_accepted(self) -> None:
        """Go on reading."""
        ...


class HeldAdds:
    """The connections that are held, in order."""

    def __init__(self, bookie: Bookie) -> None:
        self._bookie = bookie
        self._held: dict[_Holder, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        # Where each journal stood when it was looked at last: (durable offset, end offset).
        self._journals: list[tuple[int, int]] = []

    def hold(self, holder: _Holder) -> None:
        """Its adds wait."""
        self._held[holder] = None
        if self._timer is None:
            self._journals = self._bookie.journal_offsets()
            self._timer = asyncio.get_running_loop().call_later(NOTICE_INTERVAL_S, self._notice)

    def forget(self, holder: _Holder) -> None:
        """It is closed."""
        self._held.pop(holder, None)

    def release(self) -> None:
        """The write cache has room again."""
        self.close()
        held, self._held = self._held, {}
        for holder in held:
            holder.adds_accepted()

    def close(self) -> None:
        """Says nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _notice(self) -> None:
        self._timer = None
        if not self._held:
            return
        before, self._journals = self._journals, self._bookie.journal_offsets()
        stuck = any(
            durable == durable_now and durable < end
            for (durable, end), (durable_now, _) in zip(before, self._journals, strict=True)
        )
        if not stuck:
            for holder in list(self._held):
                holder.adds_held()
        self._timer = asyncio.get_running_loop().call_later(NOTICE_INTERVAL_S, self._notice)
