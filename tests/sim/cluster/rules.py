"""What must hold of owners and of what brokers serve, at every moment (broker/CLUSTER.md).

Nodes below /owners: each names the session that made it, is one of the namespace's bundles, and overlaps no other. It is
deleted by its owner, who has closed the bundle's topics, and a broker that stops makes none. A topic is served by one
broker; by two for a moment only, while its bundle moves from one to the other.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from magnetar.broker.ownership.bundle_ownership import State
from magnetar.broker.ownership.core.bundles import Bounds, Bundle
from magnetar.broker.ownership.records import (
    OWNERS_PATH,
    TRANSFERS_PATH,
    BoundsRecord,
    OwnerRecord,
    bounds_path,
    owners_path,
)
from magnetar.metadata.local import _NODE_FIELDS, _node_key
from magnetar.metadata.paths import DRAINING_BROKERS_PATH
from magnetar.proto.ids import TopicName
from sim.cluster.brokers import BrokerMachine
from sim.cluster.metadata import ClusterMetadata
from sim.cluster.receipts import raise_outside
from sim.deliveries import Violation
from sim.ledgers.metadata import _at_once
from support.sim import SimProcess

LOOK_EVERY_S = 0.02
# Two brokers may serve a topic so long while its bundle moves: the destination finds out that it does not come.
MOVING_S = 3.0


class Rules:
    """`look` may be called at any moment. Raises Violation."""

    def __init__(self, metadata: ClusterMetadata, brokers: Sequence[BrokerMachine]) -> None:
        self._metadata = metadata
        self._brokers = brokers
        self._twice: dict[str, float] = {}  # topic -> since when two brokers serve it
        self.served_twice = 0
        self.owners: dict[Bundle, OwnerRecord] = {}  # at the last look
        metadata.on_take, metadata.on_let_go = self._take, self._let_go

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Everything, now."""
        self._look_at_nodes()
        self._look_at_topics()

    def children(self, path: str) -> list[str]:
        """Of a node, as the service has them."""
        names, _ = _at_once(self._metadata.truth.children(path))
        return list(names)

    def _look_at_nodes(self) -> None:
        namespaces = [
            f"{tenant}/{name}"
            for tenant in self.children(OWNERS_PATH)
            for name in self.children(f"{OWNERS_PATH}/{tenant}")
        ]
        self.owners = {}
        for namespace in namespaces:
            self.owners |= self._look_at_namespace(namespace)

    def _look_at_namespace(self, namespace: str) -> dict[Bundle, OwnerRecord]:
        owners: dict[Bundle, OwnerRecord] = {}
        for name in self.children(owners_path(namespace)):
            path = f"{owners_path(namespace)}/{name}"
            node = self._metadata.node(path)
            assert node is not None
            record = OwnerRecord.decode(node.value, path)
            data = self._metadata.truth._storage.get(_node_key(path))
            assert data is not None
            _, session = _NODE_FIELDS.unpack_from(data)
            if session != record.session:
                raise Violation(f"{path} names session {record.session}, and is of session {session}")
            owners[Bundle.parse(f"{namespace}/{name}")] = record
        bundles = sorted(owners)
        for one, other in itertools.pairwise(bundles):
            if other.first <= one.last:
                raise Violation(
                    f"bundles {one} of {owners[one].broker} and {other} of {owners[other].broker} overlap"
                )
        node = self._metadata.node(bounds_path(namespace))
        if node is not None:
            bounds = Bounds.of(BoundsRecord.decode(node.value, "").bounds)
            if strange := set(bundles) - set(bounds.bundles(namespace)):
                raise Violation(f"{sorted(strange)[0]} has an owner, and the namespace has no such bundle")
        return owners

    def _take(self, process: SimProcess, path: str) -> None:
        """A broker asks for an owner's node. One that stops may still get what was on its way to it."""
        machine = self._machine_of(process)
        if machine is not None and machine.stops and self._metadata.destinations.get(path) != machine.name:
            raise_outside(self._metadata, f"{machine.name} takes {path} while it stops")

    def _let_go(self, process: SimProcess, path: str, record: OwnerRecord) -> None:
        """An owner's node was deleted."""
        if record.broker != process.name:
            raise Violation(f"{process.name} has deleted {path} of {record.broker}")
        machine = self._machine_of(process)
        if machine is None or machine.broker is None or not machine.broker.ownership.valid:
            return
        bundle = Bundle.parse(path.removeprefix(f"{OWNERS_PATH}/"))
        if open_topics := [name.name for name in machine.broker.loaded() if bundle.holds(name)]:
            raise Violation(f"{process.name} has let go of {bundle} while it has {open_topics[0]} open")

    def _machine_of(self, process: SimProcess) -> BrokerMachine | None:
        """Whose process this is; None: of one that is dead."""
        return next((machine for machine in self._brokers if machine.process is process), None)

    def _look_at_topics(self) -> None:
        now = self._metadata.loop.now
        serving: dict[str, list[str]] = {}
        moving = {bundle for bundle, record in self.owners.items() if record.to}
        for machine in self._brokers:
            broker = machine.broker
            if broker is None or self._metadata.deceived(machine.name) or not broker.ownership.valid:
                continue
            for key, topic in broker.topics.items():
                if topic.not_served is None:
                    serving.setdefault(key, []).append(machine.name)
        twice = {key: names for key, names in serving.items() if len(names) > 1}
        for key in [key for key in self._twice if key not in twice]:
            del self._twice[key]
        for key, names in twice.items():
            since = self._twice.setdefault(key, now)
            self.served_twice += since == now
            broker = next(machine.broker for machine in self._brokers if machine.name == names[0])
            assert broker is not None
            name = broker.topics[key].name
            moves = any(bundle.holds(name) for bundle in moving) or self._arrives(name, names)
            allowed = MOVING_S if moves else LOOK_EVERY_S * 3
            if now - since > allowed:
                raise Violation(f"{name.name} is served by {' and '.join(names)} for {now - since:.2f} s")

    def _arrives(self, topic: TopicName, names: Sequence[str]) -> bool:
        """One of these brokers was to get the topic's bundle, and does not know yet that it does not come.

        It may have asked for the node already, and wait for an answer that was lost.
        """
        for machine in self._brokers:
            if machine.name in names and machine.ownership is not None:
                found = machine.ownership.holding(topic)
                if found is not None and found[1].state in (State.ARRIVING, State.ACQUIRING):
                    return True
        return False

    # --- the end -----------------------------------------------------------------------------------------------------

    def unsettled(self, topics: Sequence[str]) -> list[str]:
        """What is not at rest: each of these topics has an owner that runs, and nothing is under way."""
        found = [
            f"{path} has {names}"
            for path in (TRANSFERS_PATH, DRAINING_BROKERS_PATH)
            if (names := self.children(path))
        ]
        sessions = {
            machine.name: machine.ownership.session.session_id
            for machine in self._brokers
            if machine.ownership is not None and machine.ownership.valid
        }
        found += [
            f"{machine.name} has no session" for machine in self._brokers if machine.name not in sessions
        ]
        for bundle, record in self.owners.items():
            if sessions.get(record.broker) != record.session:
                found.append(f"{bundle} is of session {record.session} of {record.broker}")
            if record.to:
                found.append(f"{bundle} moves to {record.to}")
        for machine in self._brokers:
            if machine.ownership is None:
                continue
            for bundle, held in machine.ownership.held.items():
                owner = self.owners.get(bundle)
                if owner is None or owner.broker != machine.name:
                    found.append(f"{machine.name} holds {bundle} ({held.state.value}) without its node")
        served = {
            topic.name
            for machine in self._brokers
            if machine.broker is not None
            for topic in machine.broker.topics.values()
            if topic.not_served is None
        }
        for topic in topics:
            here = [name for name in served if name.name == topic]
            if not here:
                found.append(f"nobody serves {topic}")
            elif not any(bundle.holds(here[0]) for bundle in self.owners):
                found.append(f"the bundle of {topic} has no owner")
        return found
