"""Backlog quotas of a topic: what its durable subscriptions may have unacknowledged, in bytes and in age, and what follows.

    no quota   --a policy sets one-->  WATCHED  --checked: more than that-->  EXCEEDED  --checked: not any more--> WATCHED
    any        --no policy sets one any more--> no quota, and what was held goes on

    EXCEEDED, by the action of the quota that is exceeded (both may be):
    hold    every producer is held, and whoever opens one waits; after OPENING_WAIT_S it may try again
    refuse  whatever is sent fails with BacklogQuotaExceeded
    drop    subscriptions are moved forward to what the quota allows: the oldest messages count as acknowledged

It is checked every CHECK_S while there are producers, when one is opened, and else every IDLE_CHECK_S. A check looks at the
slowest subscription: its bytes are summed from the end of the ledger list and estimated within its ledger; for its age the
entry at its mark is read once for each place where it stands. So a quota may be exceeded by what is published in CHECK_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from itertools import chain
from typing import Any

from magnetar.proto.errors import BacklogQuotaExceeded, MagnetarError
from magnetar.runtime.tasks import Jobs, wait_at_most

from ..cursors.core.acks import Position
from ..dispatch.subscription import Subscription
from ..log.ledger_list import LedgerList
from ..log.managed_ledger import ManagedLedger
from .core.producers import Claim, ProducerPort, Producers, ProducerSession
from .limits import TopicLimits
from .maintenance import Maintenance
from .subscriptions import Subscriptions

_log = logging.getLogger(__name__)

CHECK_S = 0.5
IDLE_CHECK_S = 30.0
OPENING_WAIT_S = 3.0
KEPT = 0.9  # of a quota, where the rest is given up
_CHECK = "the backlog quota"


class BacklogQuota:
    """Of one topic. `policies_changed` before use, `stop` in the end."""

    def __init__(
        self,
        ledger: ManagedLedger[Any],
        limits: TopicLimits,
        subscriptions: Subscriptions,
        producers: Producers,
        maintenance: Maintenance,
    ) -> None:
        self._ledger = ledger
        self._limits = limits
        self._subscriptions = subscriptions
        self._producers = producers
        self._maintenance = maintenance
        self._bytes = self._age_ms = 0  # 0: no such quota
        self._held: dict[ProducerSession, None] = {}
        self._go_on = asyncio.Event()
        self._oldest: tuple[Position, int] | None = (
            None  # where the slowest stood last, and when that was stored
        )
        self._timer: asyncio.TimerHandle | None = None
        self._jobs = Jobs(f"topic {ledger.name}")
        self._stopped = False

    def policies_changed(self) -> None:
        """What is in force may be another thing now."""
        of = self._limits.value
        self._bytes, self._age_ms = max(of("backlog_quota_bytes"), 0), max(of("backlog_quota_age_ms"), 0)
        if self._watched:
            self._check_soon()
        else:
            self._act({})

    @property
    def _watched(self) -> bool:
        return bool(self._bytes or self._age_ms) and self._ledger.name.persistent and not self._stopped

    async def admit(self, claim: Claim, new_port: Callable[[int], ProducerPort]) -> None:
        """Somebody wants to publish: waits while producers are held. Raises BacklogQuotaExceeded."""
        if not self._watched:
            return
        self._check_soon()
        with contextlib.suppress(TimeoutError):  # a disk may hang, and publishing does not need it
            async with asyncio.timeout(CHECK_S):
                await self._jobs.wait(_CHECK)
        self._next(CHECK_S)  # as soon as there are producers
        if self._limits.held:
            new_port(claim.epoch).send_delayed(BacklogQuotaExceeded(self._limits.held))
            await wait_at_most(self._go_on, OPENING_WAIT_S)
            if self._limits.held:
                raise BacklogQuotaExceeded(self._limits.held)

    async def stop(self) -> None:
        """Waits for what is under way."""
        self._stopped = True
        self._next(None)
        await self._jobs.wait()

    # --- checks ------------------------------------------------------------------------------------------------------

    def _next(self, after_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if after_s is not None:
            self._timer = asyncio.get_running_loop().call_later(after_s, self._check_soon)

    def _check_soon(self) -> None:
        self._jobs.begin(_CHECK, self._check)

    async def _check(self) -> None:
        try:
            await self._look()
        except MagnetarError as error:  # an entry that cannot be read now, or a subscription that is moved
            _log.info("topic %s: its backlog quota is checked later: %s", self._ledger.name, error)
        finally:
            if self._watched:
                self._next(CHECK_S if len(self._producers) or self._limits.held else IDLE_CHECK_S)

    async def _look(self) -> None:
        durable = [one for one in self._subscriptions.values() if one.durable]
        slowest = min(durable, key=lambda one: one.cursor.state.mark_delete, default=None)
        exceeded: dict[str, str] = {}
        if slowest is not None and self._bytes:
            mark = slowest.cursor.state.mark_delete
            if (size := bytes_behind(self._ledger.list, mark)) > self._bytes:
                action = self._exceeded(exceeded, "backlog_quota_bytes", slowest, f"{size} bytes")
                if action == "drop":
                    position = position_before(self._ledger.list, int(self._bytes * KEPT))
                    await self._maintenance.advance(durable, position)
        if slowest is not None and self._age_ms:
            now_ms = self._ledger.appending.now_ms()
            if (age_ms := now_ms - await self._stored_at(slowest, now_ms)) > self._age_ms:
                action = self._exceeded(exceeded, "backlog_quota_age_ms", slowest, f"what is {age_ms} ms old")
                if action == "drop":
                    await self._maintenance.expire_all(durable, now_ms - self._age_ms)
        self._act(exceeded if self._watched else {})

    def _exceeded(self, exceeded: dict[str, str], policy: str, slowest: Subscription, has: str) -> str:
        action = self._limits.value(
            "backlog_quota_action" if policy == "backlog_quota_bytes" else "backlog_quota_age_action"
        )
        text = (
            f"subscription {slowest.name!r} of topic {self._ledger.name} has not acknowledged {has} "
            f"({self._limits.source(policy)}); consume it, delete it, or raise the quota"
        )
        if action == "drop":
            _log.warning("%s: what is older is given up", text)
        exceeded[action] = text
        return str(action)

    async def _stored_at(self, slowest: Subscription, now_ms: int) -> int:
        """When the oldest message was stored that it has not acknowledged; `now_ms`: there is none."""
        ledgers = self._ledger.list
        mark = ledgers.normalise(slowest.cursor.state.mark_delete)
        if not ledgers.is_confirmed(*mark[:2]):
            return now_ms
        if self._oldest is None or self._oldest[0] != mark:
            self._oldest = mark, int((await self._ledger.reading.read_entry(mark[:2])).append_time_ms)
        return self._oldest[1]

    def _act(self, exceeded: dict[str, str]) -> None:
        """By action, why."""
        refused = exceeded.get("refuse")
        self._limits.refuse(None if refused is None else BacklogQuotaExceeded(refused))
        self._limits.held = exceeded.get("hold", "")
        if self._limits.held:
            self._go_on.clear()
            for session in self._producers:
                if session not in self._held:
                    self._held[session] = None
                    session.hold(self._limits.held)
            return
        self._go_on.set()
        held, self._held = self._held, {}
        for session in held:
            if session not in self._limits.ahead:
                session.hold("")


def bytes_behind(ledgers: LedgerList, mark: Position) -> int:
    """Of the entries from a mark-delete position on, estimated within its ledger."""
    ledger_id, entry_id, _ = ledgers.normalise(mark)
    size = 0
    for info in chain(reversed(ledgers.ledgers), reversed(ledgers.archived_ledgers)):
        if info.ledger_id < ledger_id:
            break
        part = max(info.entries - entry_id, 0) if info.ledger_id == ledger_id else info.entries
        size += info.size * part // max(info.entries, 1)
    return size


def position_before(ledgers: LedgerList, size: int) -> Position:
    """The first entry behind which, with itself, there are at most so many bytes, estimated in the same way."""
    for info in chain(reversed(ledgers.ledgers), reversed(ledgers.archived_ledgers)):
        if info.size > size:
            return ledgers.normalise((info.ledger_id, info.entries - info.entries * size // info.size, 0))
        size -= info.size
    return ledgers.start
