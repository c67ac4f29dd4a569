"""When an open ledger is left for one that suits better: bookies are back for more copies, one of its bookies is drained, or
policies have changed.

Not at once, because what outdates one ledger outdates thousands: each topic has its own moment within
`ledger_change_spread_ms`. It is noticed with the next entry (bookies), with the change (policies), or in the next round of
maintenance at the latest.

    SUITS --noticed--> LEAVING --own moment--> left, or SUITS again if that has changed back meanwhile
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from magnetar.proto.errors import MagnetarError

from .durability import Durability
from .moments import own_moment
from .open_ledger import OpenLedger


class LedgerChange:
    """Of one topic."""

    def __init__(
        self,
        topic: str,
        spread_ms: int,
        durability: Callable[[], Durability],
        end: Callable[[OpenLedger], None],
    ) -> None:
        """`end` leaves a ledger, if it is still the open one."""
        self._topic = topic
        self._spread_ms = spread_ms
        self._durability = durability
        self._end = end

    def soon(self, ledger: OpenLedger) -> None:
        """Looks whether the ledger suits; if not, it is left at this topic's moment."""
        if not ledger.leaving and not self._suits(ledger):
            ledger.leaving = True
            delay_s = own_moment(self._topic, self._spread_ms)
            if delay_s:
                asyncio.get_running_loop().call_later(delay_s, self.now, ledger)
            else:
                self.now(ledger)

    def now(self, ledger: OpenLedger) -> None:
        """The same without delay."""
        ledger.leaving = False
        if ledger.live and not self._suits(ledger):
            self._end(ledger)

    def _suits(self, ledger: OpenLedger) -> bool:
        try:
            return not ledger.writer.replaceable and ledger.durability == self._durability()
        except MagnetarError:  # the policies are not known now
            return True
