"""What producers and consumers of a topic may do, by its policies: rates, maxima, sizes, types. One object a topic.

It is made from what is in force (`Resolved`), and again after each change: what is not limited is None or 0, and costs the
paths of messages a comparison a run.

    publish rate    a run is queued; entries are cut to a quantum, and wait in front of the ledger until the throttle is open
                    HOLD_AT entries queued --> their producers are held; GO_ON_AT --> they go on
                    one waits for HOLD_S   --> its producers are held;   nothing  --> they go on
    dispatch rates  a throttle for each subscription: its own rate, then that of the topic, then that of the broker
    maxima          looked at when somebody comes; who is there stays when a maximum is lowered
    subscribe rate  by subscription and by the name that the consumer chose; more often is refused for the moment

A producer is held by a command of the protocol, not by reading nothing more: other producers and consumers of its connection
go on. What it had sent by then is taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from magnetar.proto.admission import AdmittedGroups
from magnetar.proto.batch_extensions import BATCH_HEADER_BYTES
from magnetar.proto.errors import (
    ConsumerBusy,
    MagnetarError,
    MessageTooLarge,
    NotAllowed,
    ProducerBusy,
    TooManyRequests,
)
from magnetar.proto.ids import TopicName

from ..dispatch.subscription import Subscription
from ..resources.rates import UNLIMITED_AMOUNT, Limit, Throttle, limits_of
from .coalescer import Coalescer
from .components import Components
from .core.producers import Producers, ProducerSession
from .policies import Resolved

# Of queued entries, which have a quantum of the rate at most: 200 ms, and half of that.
HOLD_AT = 10
GO_ON_AT = 5
HOLD_S = 0.2  # an entry that waits for longer: a slow rate, or a large batch before it
MAX_SUBSCRIBERS = 10_000  # whose subscribing is counted: of more, those that began first are forgotten
MESSAGE_OVERHEAD_BYTES = 64  # of a batch, for each message: what is not its value

PUBLISH_RATES = (
    "publish_rate_messages", "publish_rate_bytes", "broker_publish_rate_messages", "broker_publish_rate_bytes",
)  # fmt: skip
# What one more meets, by policy.
MAXIMA: dict[str, type[MagnetarError]] = {
    "max_producers": ProducerBusy,
    "max_consumers": ConsumerBusy,
    "max_consumers_per_subscription": ConsumerBusy,
    "max_subscriptions": NotAllowed,
}


class TopicLimits:
    """See the module docstring. `policies_changed` before use, `stop` in the end."""

    __slots__ = (
        "_append_soon", "_coalescer", "_components", "_dispatch", "_in_force", "_loop", "_name", "_producers",
        "_resolved", "_slow", "_subscribed", "_timer", "ahead", "held", "held_times", "max_message_bytes", "publish",
        "refusal", "unchecked_bytes",
    )  # fmt: skip

    def __init__(
        self,
        name: TopicName,
        components: Components,
        in_force: Callable[[], Resolved | None],
        producers: Producers,
        coalescer: Coalescer,
        append_soon: Callable[[], None],
    ) -> None:
        """`in_force` None: not known now, so that nothing changes. `append_soon`: queued entries may be appended."""
        self._name = name
        self._components = components
        self._in_force = in_force
        self._producers = producers
        self._coalescer = coalescer
        self._append_soon = append_soon
        self._loop = asyncio.get_running_loop()
        self._resolved = components.namespaces.of_brokers()
        self.publish: Throttle | None = None
        self.max_message_bytes = 0  # 0: what the broker takes
        # Set by the backlog quota: why all producers are held, and why what they send is refused.
        self.held = ""
        self.refuse(None)
        self.ahead: dict[ProducerSession, None] = {}  # held for being ahead of the publish rate
        self.held_times = 0  # that a producer was ahead of it
        self._slow = False  # whoever sends something is ahead
        self._timer: asyncio.TimerHandle | None = None
        self._dispatch: list[Limit] = []  # of the topic and of the broker
        self._subscribed: dict[tuple[str, str], tuple[float, int]] = {}  # since when, and how often

    def policies_changed(self, subscriptions: Iterable[Subscription]) -> bool:
        """What is in force may be another thing now: True if it is."""
        resolved = self._in_force()
        if resolved is None or resolved is self._resolved:
            return False
        self._resolved = resolved
        of = self.value
        own, own_bytes, shared, shared_bytes = map(of, PUBLISH_RATES)
        publish = [*limits_of(own, own_bytes), *self._components.publish_rates.limits(shared, shared_bytes)]
        if self.publish is not None:
            self.publish.rest()
        self.publish = Throttle(publish) if publish else None
        self._coalescer.limit(
            min([int(one.bucket.quantum) for one in publish if not one.counts_bytes], default=1 << 62),
            min(
                [int(one.bucket.quantum) for one in publish if one.counts_bytes]
                + [self._components.settings.max_entry_bytes]
            ),
        )
        self._go_on()
        self.stop()  # the wait was one of the old rate
        if self._coalescer:
            self._append_soon()
        self._dispatch = [
            *limits_of(*self._dispatch_rates("dispatch_rate")),
            *self._components.dispatch_rates.limits(
                of("broker_dispatch_rate_messages"), of("broker_dispatch_rate_bytes")
            ),
        ]
        largest: int = of("max_message_bytes")
        self.max_message_bytes = largest if largest < self._components.settings.max_message_bytes else 0
        self.refuse(self.refusal)
        for subscription in subscriptions:
            self.apply(subscription)
        return True

    def value(self, policy: str) -> Any:
        """In force; before that is known, by what the settings say."""
        return self._resolved.value(policy)[0]

    def source(self, policy: str) -> str:
        """For errors: what limits, and where it can be changed."""
        value, level = self._resolved.value(policy)
        shown = ", ".join(value) if isinstance(value, list) else value
        return f"{policy}={shown}, a policy of the {level}"

    # --- publishing --------------------------------------------------------------------------------------------------

    def queued(self, session: ProducerSession) -> None:
        """There is a publish rate, and something of a session was queued."""
        if self._slow or len(self._coalescer) >= HOLD_AT:
            self._hold(session)

    def _hold(self, session: ProducerSession) -> None:
        if session not in self.ahead:
            self.ahead[session] = None
            self.held_times += 1
            session.hold(f"topic {self._name} takes no more for now: {self.publish_rates} is reached")

    @property
    def publish_rates(self) -> str:
        """There is one: what they are, for errors."""
        return " or ".join(self.source(policy) for policy in PUBLISH_RATES if self.value(policy) > 0)

    def may_append(self) -> bool:
        """There is a publish rate: whether the next entry may be appended now; else `append_soon` is called when it may.

        Once nothing more is taken from anybody, what is queued is not kept waiting: the topic ends, or moves.
        """
        throttle, coalescer = self.publish, self._coalescer
        assert throttle is not None
        if self._producers.stopped is None and (wait_s := throttle.ready(self._loop.time())) > 0:
            if self._timer is None:
                self._timer = self._loop.call_later(wait_s, self._wait_is_over)
                if wait_s > HOLD_S:
                    self._slow = True
                    for session in coalescer.sessions():
                        self._hold(session)
            return False
        throttle.spend(coalescer.first.messages, coalescer.first.size)
        if len(coalescer) <= (1 if self._slow else GO_ON_AT):
            self._go_on()
        if len(coalescer) == 1:
            throttle.rest()
        return True

    def _wait_is_over(self) -> None:
        self._timer = None
        self._append_soon()

    def _go_on(self) -> None:
        self._slow = False
        if self.ahead:
            ahead, self.ahead = self.ahead, {}
            for session in ahead:
                session.hold(self.held)

    def refuse(self, reason: MagnetarError | None) -> None:
        """Whatever is sent, or (None) not any more."""
        self.refusal = reason
        self.unchecked_bytes = -1 if reason is not None else self.max_message_bytes or UNLIMITED_AMOUNT

    def first_refused(self, groups: AdmittedGroups) -> tuple[AdmittedGroups, int, MagnetarError] | None:
        """Groups before the first that is refused or surely has too large a message, its id, and why.

        Asked for groups of more than `unchecked_bytes` together.
        """
        if self.refusal is not None:
            return groups.part(0, 0), groups.sequence_ids[0], self.refusal
        most = self.max_message_bytes + MESSAGE_OVERHEAD_BYTES
        for position, (batch, count) in enumerate(zip(groups.batches, groups.counts)):
            if len(batch) - BATCH_HEADER_BYTES > most * count:
                error = MessageTooLarge(
                    f"{len(batch)} bytes of {count} message(s) exceed {self.source('max_message_bytes')} for topic "
                    f"{self._name}; send less at once, or raise the policy"
                )
                return groups.part(0, position), groups.sequence_ids[position], error
        return None

    # --- subscriptions -----------------------------------------------------------------------------------------------

    def apply(self, subscription: Subscription) -> None:
        """A subscription was made, or policies have changed."""
        limits = [*limits_of(*self._dispatch_rates("subscription_dispatch_rate")), *self._dispatch]
        subscription.dispatcher.handle(
            subscription.dispatcher.core.limit,
            Throttle(limits) if limits else None,
            self.value("max_unacked_messages_per_consumer"),
            self.value("max_unacked_messages_per_subscription"),
        )

    def _dispatch_rates(self, policy: str) -> tuple[float, float]:
        """A second."""
        periods = 1_000 / self.value(f"{policy}_period_ms")
        return self.value(f"{policy}_messages") * periods, self.value(f"{policy}_bytes") * periods

    def check_room(self, policy: str, of: Callable[[], int]) -> None:
        """One more is about to come beside `of()`: raises the error of MAXIMA if the policy does not allow that."""
        most = self.value(policy)
        if most > 0 and (count := of()) >= most:
            what = policy.removeprefix("max_").replace("_per_", " of its ")
            raise MAXIMA[policy](
                f"topic {self._name} has {count} {what} already ({self.source(policy)}); close one, or raise the policy"
            )

    def check_type(self, type: str) -> None:
        """Raises NotAllowed for a type of subscription that the policies do not have."""
        allowed = self.value("subscription_types")
        if allowed and type not in allowed:
            raise NotAllowed(
                f"topic {self._name} has no subscriptions of type {type} ({self.source('subscription_types')})"
            )

    def check_subscribing(self, subscription: str, consumer: str) -> None:
        """Counts that somebody subscribes. Raises TooManyRequests if the same one did so too often of late."""
        most = self.value("subscribe_rate")
        if most <= 0 or not subscription:
            return
        now, period_s = self._loop.time(), self.value("subscribe_rate_period_ms") / 1000
        since, count = self._subscribed.pop((subscription, consumer), (now, 0))
        if now - since >= period_s:
            since, count = now, 0
        self._subscribed[subscription, consumer] = since, min(count + 1, most)
        if len(self._subscribed) > MAX_SUBSCRIBERS:
            del self._subscribed[next(iter(self._subscribed))]
        if count >= most:
            raise TooManyRequests(
                f"consumer {consumer!r} of subscription {subscription!r} has subscribed {count} times to topic {self._name} "
                f"({self.source('subscribe_rate')}); it may again in {period_s - (now - since):.1f} s"
            )

    def stop(self) -> None:
        """The topic ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
