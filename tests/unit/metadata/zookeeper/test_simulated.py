"""The whole store on a model of ZooKeeper, in virtual time, under a seed: paused processes, partitions, cut connections."""

from __future__ import annotations

import asyncio
import random

import pytest

from magnetar.metadata import Create, Put
from magnetar.metadata.zookeeper import wire
from magnetar.metadata.zookeeper.address import parse_address
from magnetar.metadata.zookeeper.store import ZooKeeperMetadataStore, ZooKeeperSettings, open_zookeeper_store
from magnetar.proto.errors import (
    AlreadyClosed,
    AlreadyExists,
    ConnectionLost,
    NotFoundInStore,
    ServiceNotReady,
    VersionConflict,
)
from magnetar.runtime.clock import elapsed_s
from support.sim import SimLoop
from support.zookeeper_model import Door, ModelZooKeeper, Refused

TIMEOUT_S = 4.0
STORM_S = 60.0
OWNERS = ("broker-1", "broker-2", "broker-3")


class Contest:
    """Brokers that want to own one thing; what they believe is written down when they would act on it."""

    def __init__(self, seed: int) -> None:
        self.loop = SimLoop(seed=seed)
        self.rng = random.Random(seed)
        self.model = ModelZooKeeper(self.loop)
        self.url = self.model.start()
        self.model.lags = {"zk-2": self.rng.random() * 2, "zk-3": self.rng.random() * 0.1}
        self.owned = 0  # how often somebody became the owner
        self.acts = 0
        self.confirmed = 0  # increments of the counter that were answered
        self.unknown = 0
        self.killed = 0  # brokers, each of which may have had an increment under way
        self.ids: list[int] = []
        self.stopping = False

    async def broker(self, name: str) -> None:
        """Takes the ownership when it is free, acts as long as its session lives, and counts."""
        store = await self.open(name)
        while not self.stopping:
            try:
                session = await store.open_session(TIMEOUT_S)
            except ConnectionLost:
                continue
            try:
                await store.create("/owner", name.encode(), session=session)
            except (AlreadyExists, ConnectionLost, AlreadyClosed):
                await self.wait_for_change(store)
                await session.close()
                continue
            self.owned += 1
            while not session.lost and not self.stopping:
                self.act(name)
                await self.count(store)
                await asyncio.sleep(self.rng.random() * 0.5)
            await session.close()
        await store.close()

    async def open(self, name: str) -> ZooKeeperMetadataStore:
        """Once the servers can be reached."""
        while True:
            try:
                rng = random.Random(f"{name} {self.rng.random()}")
                return await open_zookeeper_store(self.url, rng=rng, clock=self.loop.time)
            except ServiceNotReady:
                continue

    def act(self, name: str) -> None:
        """The owner acknowledges something. In truth it must still own it."""
        self.acts += 1
        node = self.model.nodes.get("/owner")
        assert node is not None, f"{name} acts after its session has ended"
        assert node.value == name.encode(), f"{name} acts, and {node.value!r} is the owner"

    async def wait_for_change(self, store: ZooKeeperMetadataStore) -> None:
        changed = asyncio.Event()
        watch = store.watch("/owner", lambda _: changed.set())
        try:
            async with asyncio.timeout(20):
                if await store.get("/owner") is not None:
                    await changed.wait()
        except (TimeoutError, ConnectionLost):
            pass
        watch.close()

    async def count(self, store: ZooKeeperMetadataStore) -> None:
        try:
            node = await store.get("/counter")
            assert node is not None
            await store.put("/counter", b"%d" % (int(node.value) + 1), version=node.version)
            self.confirmed += 1
            self.ids.append(await store.next_id("ids"))
        except ConnectionLost:
            self.unknown += 1
        except VersionConflict:
            pass

    async def main(self) -> None:
        store = await open_zookeeper_store(self.url, rng=random.Random(0), clock=self.loop.time)
        await store.create("/counter", b"0")
        brokers = {name: self.loop.start_process(name).spawn(self.broker(name)) for name in OWNERS}
        names = [*OWNERS, "zk-1", "zk-2", "zk-3"]
        until = self.loop.time() + STORM_S
        while self.loop.time() < until:
            await asyncio.sleep(self.rng.random() * 2)
            seconds = self.rng.choice([0.1, 1.0, 3.0, 8.0])
            match self.rng.randrange(6):
                case 0:
                    self.loop.processes[self.rng.choice(names)].pause(seconds)
                case 1:
                    self.loop.network.block(self.rng.choice(names), self.rng.choice(names), seconds)
                case 2:
                    self.loop.network.partition(seconds)
                case 3:
                    self.loop.processes[self.rng.choice(OWNERS)].busy(seconds)
                case 4:
                    name = self.rng.choice(OWNERS)
                    self.loop.processes[name].kill(power=self.rng.random() < 0.5)
                    self.killed += 1
                    brokers[name] = self.loop.start_process(name).spawn(self.broker(name))
                case _:
                    self.loop.network.cut_one()
        owned = self.owned
        async with asyncio.timeout(60):  # liveness after healing
            while self.owned == owned and not self.acts:
                await asyncio.sleep(0.1)
        self.stopping = True
        async with asyncio.timeout(60):
            await asyncio.gather(*brokers.values())
        counter = self.model.nodes["/counter"]
        assert counter.value is not None
        assert self.confirmed <= int(counter.value) <= self.confirmed + self.unknown + self.killed
        assert int(counter.value) == counter.version
        assert len(set(self.ids)) == len(self.ids)
        assert self.acts > 20, "a minimum load"
        await store.close()


@pytest.mark.sim
def test_rule_31_nobody_acts_as_owner_after_its_session_has_ended(sim_seed: int) -> None:
    contest = Contest(sim_seed)
    try:
        contest.loop.run(contest.main())
    finally:
        contest.loop.close()


async def test_a_store_that_is_closed_before_its_first_turn() -> None:
    """Seed 25: a dial that was cancelled before its task had begun was awaited for ever."""
    before = asyncio.all_tasks()
    store = ZooKeeperMetadataStore(
        parse_address("zk://127.0.0.1:1"),
        rng=random.Random(1),
        clock=elapsed_s,
        tls=None,
        settings=ZooKeeperSettings(),
    )
    async with asyncio.timeout(5):
        await store.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


def test_servers_that_lag_behind() -> None:
    """What a process wrote or read it goes on seeing, over whichever session; what is reported as absent is absent."""
    loop = SimLoop(seed=1)
    model = ModelZooKeeper(loop)
    url = model.start()
    model.lags = {"zk-2": 3.0, "zk-3": 3.0}

    async def main() -> None:
        for seed in range(20):
            store = await open_zookeeper_store(url, rng=random.Random(seed), clock=loop.time)
            other = await open_zookeeper_store(url, rng=random.Random(seed + 100), clock=loop.time)
            session = await store.open_session(4)
            await store.create(f"/plain-{seed}", b"0")
            assert await other.get(f"/plain-{seed}") is not None, "found, once the leader was asked"
            for number in range(5):
                path = f"/{seed}-{number}"
                await store.create(path, b"", session=session)
                assert path[1:] in await other.children("/")
                await store.commit(
                    [Put(f"/plain-{seed}", b"%d" % number, number), Create(f"{path}x", b"", session)]
                )
                assert await store.get(f"/plain-{seed}") == (b"%d" % number, number + 1)
            changes: list[str] = []
            other.watch(f"/plain-{seed}", changes.append)
            node = await other.get(f"/plain-{seed}")
            assert node is not None
            if node.version < 5:
                await asyncio.sleep(4)
                assert changes, "what this read did not show was reported"
            await store.close()
            await other.close()

    try:
        loop.run(main())
    finally:
        loop.close()


def test_the_store_in_virtual_time() -> None:
    loop = SimLoop(seed=1)
    model = ModelZooKeeper(loop)
    url = model.start()

    async def main() -> None:
        store = await open_zookeeper_store(
            url + "/root", rng=random.Random(1), clock=loop.time, make_root=True
        )
        assert await store.create("/a/b/c", b"1") == 0
        assert await store.get("/a") is None
        assert await store.create("/a", b"") == 1
        await store.delete("/a/b/c")
        assert await store.children("/a") == []
        with pytest.raises(NotFoundInStore):
            await store.put("/b", b"", version=0)
        await store.close()

    try:
        loop.run(main())
    finally:
        loop.close()
    assert sorted(model.nodes) == ["/", "/root", "/root/a"]


def test_a_list_that_is_read_in_pages_is_sent_twice_and_again_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each page took all names: reading a list was quadratic in its length."""
    loop = SimLoop(seed=1)
    model = ModelZooKeeper(loop)
    url = model.start()
    sent = 0
    get_children = wire.get_children

    def counted(path: str) -> wire.Request:
        nonlocal sent
        sent += path.endswith("/topics")
        return get_children(path)

    async def pages(store: ZooKeeperMetadataStore, *, made: str = "") -> list[str]:
        found: list[str] = []
        while page := await store.children("/topics", after=found[-1] if found else "", limit=10):
            found += page
            if made and len(found) == 100:
                await store.create(f"/topics/{made}", b"")
        return found

    async def main() -> None:
        nonlocal sent
        store = await open_zookeeper_store(url, rng=random.Random(1), clock=loop.time)
        names = [f"t{number:03d}" for number in range(200)]
        for name in names:
            await store.create(f"/topics/{name}", b"")
        monkeypatch.setattr(wire, "get_children", counted)
        assert await pages(store) == names
        assert sent == 2
        sent = 0
        assert await pages(store, made="t150a") == sorted([*names, "t150a"])
        assert sent == 4
        assert not store._paged
        await store.close()

    try:
        loop.run(main())
    finally:
        loop.close()


def test_a_watch_that_a_server_refuses_is_armed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = SimLoop(seed=1)
    model = ModelZooKeeper(loop)
    url = model.start()
    refusals = 2
    request = Door._request

    def refusing(door: Door, opcode: int, frame: bytes) -> bytes:
        nonlocal refusals
        if opcode == wire.Opcode.ADD_WATCH and refusals:
            refusals -= 1
            raise Refused(wire.ZooKeeperError.NO_AUTH)
        return request(door, opcode, frame)

    async def main() -> None:
        monkeypatch.setattr(Door, "_request", refusing)
        store = await open_zookeeper_store(url, rng=random.Random(1), clock=loop.time)
        other = await open_zookeeper_store(url, rng=random.Random(2), clock=loop.time)
        changes: list[str] = []
        store.watch("/list", changes.append)
        await other.create("/list/a", b"")
        await asyncio.sleep(20)
        assert changes, "what was missed meanwhile"
        changes.clear()
        await other.create("/list/b", b"")
        await asyncio.sleep(1)
        assert changes
        await store.close()
        await other.close()

    try:
        loop.run(main())
    finally:
        loop.close()
