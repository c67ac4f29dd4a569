"""The regular rounds of a topic. One closes an old ledger, trims what nobody needs, sweeps staged ledgers, and begins a
compaction that is due. The other is that of expiry.

**Expiry**: messages that have waited longer than their TTL count as acknowledged. Where that time lies in the topic is
looked for once for each TTL that its subscriptions have, from the lowest of their mark-delete positions on: by the times of
ledgers, then by a binary search in one of them. A subscription that has nothing old costs a comparison, and a topic whose
policies have no TTL costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.clock import Clock
from magnetar.runtime.tasks import Jobs

from ..compaction.topic_compaction import TopicCompaction
from ..cursors.core.acks import Position
from ..dispatch.subscription import Subscription
from ..export.staging import Staging
from ..log.managed_ledger import ManagedLedger
from ..log.positions import find_expired
from .policies import Resolved
from .retention import Retention

_log = logging.getLogger(__name__)


class Maintenance:
    """Of one topic; `stop` in the end. `subscriptions` come and go; those whose cursor cannot be read are not among them."""

    def __init__(
        self,
        ledger: ManagedLedger[Any],
        subscriptions: Mapping[str, Subscription],
        retention: Retention,
        compaction: TopicCompaction,
        policies: Callable[[], Resolved | None],
        clock: Clock,
    ) -> None:
        """`policies` None: not known now."""
        self._log = ledger.reading
        self._ledger = ledger
        self._subscriptions = subscriptions
        self._retention = retention
        self._compaction = compaction
        self._policies = policies
        self._clock = clock
        self._jobs = Jobs(f"topic {ledger.name}")

    def round(self, staging: Staging | None) -> None:
        """Begins a round; what is still under way from the last one is left to it. `staging` None: nothing is staged."""
        self._ledger.appending.roll_if_due()
        changes = self._ledger.changes
        if changes.trimmable(self._limit):
            self._jobs.begin("trimming", lambda: changes.trim(self._limit))
        self._compaction.round()
        if staging is not None and len(staging):
            self._jobs.begin("sweeping staged ledgers", staging.sweep)

    def _limit(self) -> Position:
        return self._retention.trimmed_until().position

    async def trimmed(self) -> None:
        """The trimming that was under way is over."""
        await self._jobs.wait("trimming")

    @property
    def waits_for_time(self) -> bool:
        """True if messages will have to be deleted, or expire, some time later: the topic has to stay loaded for that."""
        end, normalise = self._ledger.list.end, self._log.normalise
        return self._retention.waits_for_time or any(
            normalise(one.cursor.state.mark_delete) < end
            for subscriptions in self._by_ttl().values()
            for one in subscriptions
        )

    async def stop(self) -> None:
        """Waits for what is under way."""
        await self._jobs.wait()

    # --- expiry ------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Begins a round of expiry, if there is anything with a TTL, and none is under way."""
        if self._by_ttl():
            self._jobs.begin("expiry", self._expire)

    async def expired(self) -> None:
        """The round of expiry that was begun is over."""
        await self._jobs.wait("expiry")

    async def expire_before(self, subscription: Subscription, before_ms: int) -> bool:
        """Acknowledges what was stored before a time, in ms since the epoch; durable when it returns. False: it was.

        Raises TopicBusy during a seek, and why what has to be looked at cannot be read.
        """
        mark = subscription.cursor.state.mark_delete
        return await subscription.skip_to(lambda: self._find(before_ms, mark))

    async def _find(self, before_ms: int, mark_delete: Position) -> Position:
        return await find_expired(self._ledger.list, self._log.read_entry, before_ms, mark_delete)

    def _by_ttl(self) -> dict[int, list[Subscription]]:
        """Durable subscriptions that have a TTL, by milliseconds."""
        found: dict[int, list[Subscription]] = {}
        policies = self._policies()
        if policies is not None and policies.has_ttl:
            for name, subscription in self._subscriptions.items():
                ttl_ms, _ = policies.ttl_ms(name)
                if ttl_ms and subscription.durable:
                    found.setdefault(ttl_ms, []).append(subscription)
        return found

    async def _expire(self) -> None:
        """What cannot be read or written now is left to the next round."""
        for ttl_ms, subscriptions in self._by_ttl().items():
            try:
                await self.expire_all(subscriptions, self._clock.now_ms() - ttl_ms)
            except MagnetarError as error:
                _log.warning(
                    "topic %s: messages older than %d ms do not expire yet: %s",
                    self._ledger.name,
                    ttl_ms,
                    error,
                )

    async def expire_all(self, subscriptions: Iterable[Subscription], before_ms: int) -> None:
        """They acknowledge what was stored before a time."""
        mark = min(one.cursor.state.mark_delete for one in subscriptions)
        await self.advance(subscriptions, await self._find(before_ms, mark))

    async def advance(self, subscriptions: Iterable[Subscription], position: Position) -> None:
        """They acknowledge all before a position, as far as they can be moved now."""

        async def found() -> Position:
            return position

        for subscription in subscriptions:
            if subscription.cursor.state.mark_delete < position:
                try:
                    await subscription.skip_to(found)
                except MagnetarError as error:  # it seeks, is deleted, or its cursor cannot be written
                    _log.info(
                        "topic %s: subscription %r does not expire yet: %s",
                        self._ledger.name, subscription.name, error,
                    )  # fmt: skip
