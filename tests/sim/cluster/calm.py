"""What a cluster must do when nothing is broken: find topics at once, and carry out what operators wish.

What is only slow or clumsy loses nothing, as the ledgers see to that. So it is looked for here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from magnetar.broker.ownership.core.bundles import Bundle
from magnetar.broker.ownership.records import STOPPING
from magnetar.client import Client
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ids import TopicName
from sim.cluster.brokers import BrokerMachine
from sim.cluster.storm import Cluster
from sim.deliveries import Violation

WISH_S = 5.0  # for a transfer, a split, a drain
SERVED_AGAIN_S = 9.0  # after the death of a broker: its session, a held look-up, a load
CUT_OFF_S = 6.0  # so long one client cannot reach an owner that is well
FOUND_AGAIN_S = 12.0  # by that client: two attempts to connect, and a look-up held for two session timeouts
NEW_NAMESPACES = 6
EVENTS_LATE_S = 0.4
SETTLED_S = 0.1  # until all brokers know what one has said
RACES = 3  # of two requests that must not both be carried out


class Calm:
    """`connect` makes a client. `play` raises Violation."""

    def __init__(
        self, cluster: Cluster, connect: Callable[..., Awaitable[Client]], topics: list[str]
    ) -> None:
        self._cluster = cluster
        self._connect = connect  # operation_timeout may be given, in seconds
        self._topics = [TopicName.parse(topic) for topic in topics]

    async def play(self) -> None:
        """One after another, in an order that shows most."""
        await self._find_topics()
        await self._find_new_topics()
        await self._find_a_topic_whose_owner_cannot_be_reached()
        await self._transfer()
        await self._split()
        await self._split_twice_at_once()
        await self._take_what_is_divided()
        await self._lose_a_session()
        await self._drain_and_crash()
        await self._stop()

    async def _find_topics(self) -> None:
        """A new client comes to each topic without being sent away by anybody."""
        client = await self._connect("newcomer")
        before = self._cluster.metadata.refusals
        for name in self._topics:
            await client.admin.topic_stats(str(name))
            reader = await client.create_reader(str(name), start="latest")
            await reader.close()
        self._nobody_was_sent_away(before)
        await client.close()

    async def _find_new_topics(self) -> None:
        """The same where nobody owns the bundle yet: whoever is to take it is asked, and takes it."""
        client = await self._connect("newcomer")
        before = self._cluster.metadata.refusals
        for number in range(NEW_NAMESPACES):
            producer = await client.create_producer(f"persistent://public/new-{number}/orders")
            await producer.close()
        self._nobody_was_sent_away(before)
        await client.close()

    def _nobody_was_sent_away(self, before: int) -> None:
        if times := self._cluster.metadata.refusals - before:
            raise Violation(f"a new client was sent away {times} times in a calm cluster")

    async def _find_a_topic_whose_owner_cannot_be_reached(self) -> None:
        """The owner lives, so it gets no successor: the client is told in time to try that broker again."""
        loop, name = self._cluster.loop, self._topics[0]
        owner = self._bundle_of(name)[1]
        stranger = loop.start_process("stranger")
        loop.network.block(stranger.name, owner, CUT_OFF_S)
        loop.network.block(owner, stranger.name, CUT_OFF_S)

        async def ask() -> None:
            client = await self._connect(stranger.name, operation_timeout=4 * FOUND_AGAIN_S)
            await client.admin.topic_stats(str(name))
            await client.close()

        asking = stranger.spawn(ask(), name="stranger")
        await asyncio.wait([asking], timeout=FOUND_AGAIN_S)
        if not asking.done():
            raise Violation(
                f"a client that could not reach {owner} for {CUT_OFF_S:g} s looks for {name.name} after {FOUND_AGAIN_S:g} s"
            )
        asking.result()
        stranger.kill()

    # --- wishes ------------------------------------------------------------------------------------------------------

    def _bundle_of(self, name: TopicName) -> tuple[Bundle, str]:
        """And its owner's name."""
        self._cluster.rules.look()
        for bundle, record in self._cluster.rules.owners.items():
            if bundle.holds(name):
                return bundle, record.broker
        raise Violation(f"the bundle of {name.name} has no owner")

    def _others(self, owner: str) -> list[BrokerMachine]:
        return [machine for machine in self._cluster.brokers if machine.name != owner]

    async def _wish(self, what: str, by: BrokerMachine, work: Callable[[], Awaitable[object]]) -> None:
        for failed in await self._wish_at_once(what, (by, work)):
            raise Violation(f"{what} failed in a calm cluster: {failed}")

    async def _wish_at_once(
        self, what: str, *wishes: tuple[BrokerMachine, Callable[[], Awaitable[object]]]
    ) -> list[MagnetarError]:
        """What was refused, and why."""
        failed: list[MagnetarError] = []

        async def ask(work: Callable[[], Awaitable[object]]) -> None:
            try:
                await work()
            except MagnetarError as error:
                failed.append(error)

        tasks = []
        for by, work in wishes:
            assert by.process is not None
            tasks.append(by.process.spawn(ask(work), name=what))
        _, late = await asyncio.wait(tasks, timeout=WISH_S)
        if late:
            raise Violation(f"{what} is not done after {WISH_S:g} s in a calm cluster")
        for task in tasks:
            task.result()
        self._cluster.rules.look()
        return failed

    async def _transfer(self) -> None:
        name = self._topics[0]
        bundle, owner = self._bundle_of(name)
        target = self._others(owner)[0]
        ownership = self._machine(owner).ownership
        assert ownership is not None
        what = f"the transfer of {bundle} from {owner} to {target.name}"
        await self._wish(
            what, self._machine(owner), lambda: ownership.administration.transfer(str(bundle), target.name)
        )
        await self._until(lambda: self._bundle_of(name)[1] == target.name, 2.0, what)

    async def _split(self) -> None:
        bundle, owner = self._bundle_of(self._topics[0])
        machine = self._machine(owner)
        ownership = machine.ownership
        assert ownership is not None
        if bundle.first == bundle.last:
            return
        await self._wish(
            f"the split of {bundle}", machine, lambda: ownership.administration.split(str(bundle))
        )
        part, its_owner = self._bundle_of(self._topics[0])
        if part == bundle or its_owner != owner:
            raise Violation(f"{bundle} of {owner} was divided, and now {part} is of {its_owner}")

    async def _split_twice_at_once(self) -> None:
        """Two owners divide a bundle each of one namespace: one may come too late, and must not undo what the other did."""
        bundle, owner = self._bundle_of(self._topics[0])
        here, there = self._machine(owner), self._others(owner)[0]
        one_ownership, other_ownership = here.ownership, there.ownership
        assert one_ownership is not None
        assert other_ownership is not None
        rest = [one for one in self._owned_by(owner) if one.namespace == bundle.namespace and one != bundle]
        if rest:
            moving = partial(one_ownership.administration.transfer, str(rest[0]), there.name)
            await self._wish(f"the transfer of {rest[0]} from {owner} to {there.name}", here, moving)
        for _ in range(RACES):
            bundle = self._bundle_of(self._topics[0])[0]
            other = next(one for one in self._owned_by(there.name) if one.namespace == bundle.namespace)
            failed = await self._wish_at_once(
                "the splits of two bundles",
                (here, partial(one_ownership.administration.split, str(bundle))),
                (there, partial(other_ownership.administration.split, str(other))),
            )
            if len(failed) > 1:
                raise Violation(f"none of two splits was done in a calm cluster: {failed}")

    async def _take_what_is_divided(self) -> None:
        """A bundle that nobody owns is divided in the moment in which another broker takes it, also of a new namespace."""
        divides, takes = self._cluster.brokers[:2]
        one, other = divides.ownership, takes.ownership
        assert one is not None
        assert other is not None
        for number in range(RACES):
            name = TopicName.parse(f"persistent://public/divided-{number}/orders")
            namespace = f"{name.tenant}/{name.namespace}"
            what = f"dividing and taking the bundle of {namespace}"
            take: Callable[[], Awaitable[object]] = partial(other.claim, name)
            if number % 2:  # it has bounds already
                await self._wish_at_once(what, (divides, partial(one.administration.split, str(name))))
                take = partial(other.locate, name, authoritative=True, unreachable="")
            # Both know that nobody owns it, and so are as fast as each other.
            await self._wish_at_once(
                what,
                (divides, partial(one.administration.bundles, namespace)),
                (takes, partial(other.administration.bundles, namespace)),
            )
            await self._wish_at_once(
                what,
                (divides, partial(one.administration.split, str(name))),
                (takes, take),
            )
            bundle, owner = self._bundle_of(name)
            if owner != takes.name:
                raise Violation(f"{takes.name} was to take {bundle}, which is of {owner}")

    async def _lose_a_session(self) -> None:
        """Its holder has the next one before it is told what went with the first, and takes nothing of that for its own."""
        metadata, owner = self._cluster.metadata, self._bundle_of(self._topics[0])[1]
        metadata.events_late_s = EVENTS_LATE_S
        metadata.holders[owner].expire()
        await asyncio.sleep(2 * EVENTS_LATE_S)
        metadata.events_late_s = 0.0
        topics = [name.name for name in self._topics]

        def settled() -> bool:
            self._cluster.rules.look()
            return not self._cluster.rules.unsettled(topics)

        await self._until(settled, SERVED_AGAIN_S, f"serving what {owner} had, whose session was lost,")

    async def _drain_and_crash(self) -> None:
        """The drained broker hands over all it has, and gets nothing when another one dies."""
        loop = self._cluster.loop
        owner = self._bundle_of(self._topics[0])[1]
        drained = self._machine(owner)
        asked = self._others(owner)[0]
        ownership = asked.ownership
        assert ownership is not None
        await self._wish(
            f"draining {owner}", asked, lambda: ownership.administration.drain(owner, undo=False)
        )
        await self._until(lambda: not self._owned_by(owner), WISH_S, f"draining {owner}")
        asked.crash()
        died = loop.time()
        while not self._all_served() and loop.time() < died + SERVED_AGAIN_S:
            await asyncio.sleep(0.1)
            if bundles := self._owned_by(owner):
                raise Violation(f"{owner}, which is drained, has {bundles[0]}")
        if not self._all_served():
            raise Violation(f"not all topics are served {SERVED_AGAIN_S:g} s after the death of {asked.name}")
        await self._until(lambda: asked.ownership is not None, 20.0, f"the start of {asked.name}")
        again = asked.ownership
        assert again is not None
        await self._wish(
            f"no longer draining {owner}", asked, lambda: again.administration.drain(owner, undo=True)
        )
        await self._until(
            lambda: drained.ownership is not None and drained.ownership.state == "ready", 5.0, owner
        )
        await asyncio.sleep(SETTLED_S)

    async def _stop(self) -> None:
        """It hands over while it stops, and takes nothing, of which it tells the others."""
        owner = self._bundle_of(self._topics[0])[1]
        said = self._cluster.metadata.states.setdefault(owner, [])
        said.clear()
        self._machine(owner).stop()
        await self._until(lambda: not self._owned_by(owner), WISH_S, f"stopping {owner}")
        if STOPPING not in said:
            raise Violation(f"{owner} did not say that it stops")
        await self._until(self._all_served, SERVED_AGAIN_S, f"serving what {owner} had, which stopped,")

    # --- looking -----------------------------------------------------------------------------------------------------

    def _machine(self, name: str) -> BrokerMachine:
        return next(machine for machine in self._cluster.brokers if machine.name == name)

    def _owned_by(self, name: str) -> list[Bundle]:
        self._cluster.rules.look()
        return [bundle for bundle, record in self._cluster.rules.owners.items() if record.broker == name]

    def _all_served(self) -> bool:
        served = {
            topic.name
            for machine in self._cluster.brokers
            if machine.broker is not None
            for topic in machine.broker.topics.values()
            if topic.not_served is None
        }
        return served.issuperset(self._topics)

    async def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = self._cluster.loop.time() + seconds
        while not condition():
            if self._cluster.loop.time() > deadline:
                raise Violation(f"{what} is not done {seconds:g} s later in a calm cluster")
            await asyncio.sleep(0.05)
