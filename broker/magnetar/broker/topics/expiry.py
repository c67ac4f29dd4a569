"""Messages that have waited longer than their TTL count as acknowledged: a round every `message_expiry_interval_s`.

Where that time lies in the topic is looked for once for each TTL that its subscriptions have, from the lowest of their
mark-delete positions on: by the times of ledgers, then by a binary search in one of them. A subscription that has nothing
old costs a comparison, and a topic whose policies have no TTL costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.clock import Clock

from ..cursors.core.acks import Position
from ..dispatch.subscription import Subscription
from ..log.ledger_list import LedgerList
from ..log.positions import ReadEntry, find_expired
from .policies import Resolved

_log = logging.getLogger(__name__)


class Expiry:
    """Of one topic. `subscriptions` are its own, which come and go; those whose cursor cannot be read are not among them."""

    def __init__(
        self,
        ledgers: LedgerList,
        read_entry: ReadEntry,
        subscriptions: Mapping[str, Subscription],
        policies: Callable[[], Resolved | None],
        clock: Clock,
    ) -> None:
        """`policies` None: not known now."""
        self._ledgers = ledgers
        self._read_entry = read_entry
        self._subscriptions = subscriptions
        self._policies = policies
        self._clock = clock

    async def expire(self, subscription: Subscription, before_ms: int) -> bool:
        """Acknowledges what was stored before a time, in ms since the epoch; durable when it returns. False: it was.

        Raises TopicBusy during a seek, and why what has to be looked at cannot be read.
        """
        mark = subscription.cursor.state.mark_delete
        return await subscription.skip_to(lambda: self._find(before_ms, mark))

    async def _find(self, before_ms: int, mark_delete: Position) -> Position:
        return await find_expired(self._ledgers, self._read_entry, before_ms, mark_delete)

    @property
    def waits_for_time(self) -> bool:
        """True if a subscription has a TTL and a backlog."""
        end, normalise = self._ledgers.end, self._ledgers.normalise
        return any(
            normalise(one.cursor.state.mark_delete) < end
            for subscriptions in self.by_ttl().values()
            for one in subscriptions
        )

    def by_ttl(self) -> dict[int, list[Subscription]]:
        """Durable subscriptions that have a TTL, by milliseconds."""
        found: dict[int, list[Subscription]] = {}
        policies = self._policies()
        if policies is not None and policies.has_ttl:
            for name, subscription in self._subscriptions.items():
                ttl_ms, _ = policies.ttl_ms(name)
                if ttl_ms and subscription.durable:
                    found.setdefault(ttl_ms, []).append(subscription)
        return found

    async def run(self) -> None:
        """One round. What cannot be read or written now is left to the next one."""
        for ttl_ms, subscriptions in self.by_ttl().items():
            try:
                await self._expire(subscriptions, self._clock.now_ms() - ttl_ms)
            except MagnetarError as error:
                _log.warning(
                    "topic %s: messages older than %d ms do not expire yet: %s",
                    self._ledgers.name,
                    ttl_ms,
                    error,
                )

    async def _expire(self, subscriptions: Iterable[Subscription], before_ms: int) -> None:
        lowest = min(one.cursor.state.mark_delete for one in subscriptions)
        position = await self._find(before_ms, lowest)

        async def found() -> Position:
            return position

        for subscription in subscriptions:
            if subscription.cursor.state.mark_delete < position:
                try:
                    await subscription.skip_to(found)
                except MagnetarError as error:  # it seeks, is deleted, or its cursor cannot be written
                    _log.info(
                        "topic %s: subscription %r does not expire yet: %s",
                        self._ledgers.name,
                        subscription.name,
                        error,
                    )
