"""Three servers: their leader is killed or paused, their quorum goes, and nothing is lost silently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from magnetar.metadata import MetadataStore
from magnetar.proto.errors import AlreadyClosed, AlreadyExists, ConnectionLost, VersionConflict
from magnetar.runtime.clock import elapsed_s
from support.zookeeper import Ensemble, ZooKeeperServer, ensemble_or_skip, open_store, opened

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.real]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """Three servers."""
    # A session may last longer than any pause of this machine.
    longest = "maxSessionTimeout=120000\n"
    with ensemble_or_skip(tmp_path_factory.mktemp("ensemble"), 3, longest) as started:
        yield started


@pytest.fixture
def ensemble(shared: Ensemble) -> Ensemble:
    """All of them serve, whatever the test before did to them."""
    shared.start()
    return shared


@pytest.fixture
def root(ensemble: Ensemble, tmp_path: Path) -> str:
    """An address of this test alone."""
    return f"{ensemble.url}/{tmp_path.name}"


class Load:
    """Reads and writes at full speed, which know what they were answered."""

    def __init__(self, store: MetadataStore) -> None:
        self.store = store
        self.confirmed: list[str] = []  # nodes whose creation was answered
        self.unknown: list[str] = []  # nodes whose creation was not
        self.ids: list[int] = []
        self.stopping = False
        self.longest_s = 0.0  # between two answers
        self.last = elapsed_s()

    async def run(self) -> None:
        """Until `stopping`; an error that a caller must not see ends it."""
        await asyncio.gather(self.creates(), self.draws(), self.reads())

    async def creates(self) -> None:
        number = 0
        while not self.stopping:
            path = f"/load/{number}"
            number += 1
            try:
                await self.store.create(path, b"")
                self.confirmed.append(path)
            except ConnectionLost:
                self.unknown.append(path)
            self.answered()

    async def draws(self) -> None:
        while not self.stopping:
            self.ids.append(await self.store.next_id("ids"))

    async def reads(self) -> None:
        while not self.stopping:
            assert await self.store.get("/there") is not None

    def answered(self) -> None:
        now = elapsed_s()
        self.longest_s, self.last = max(self.longest_s, now - self.last), now


async def progress(load: Load, count: int) -> None:
    """So many more nodes."""
    until = len(load.confirmed) + count
    while len(load.confirmed) < until:
        await asyncio.sleep(0.01)


def kill(server: ZooKeeperServer) -> None:
    server.kill()


def pause(server: ZooKeeperServer) -> None:
    server.pause()


@pytest.mark.parametrize("fault", [kill, pause])
async def test_the_leader_goes_and_nothing_is_lost_silently(
    ensemble: Ensemble, root: str, fault: Callable[[ZooKeeperServer], None]
) -> None:
    store = await open_store(root, make_root=True)
    await store.create("/there", b"")
    session = await store.open_session(20)
    await store.create("/owner", b"", session=session)
    load = Load(store)
    running = asyncio.ensure_future(load.run())
    await progress(load, 50)
    leader = ensemble.leader()
    load.longest_s = 0.0
    fault(leader)
    await progress(load, 200)
    load.stopping = True
    await running
    assert not session.lost
    async with opened(root) as witness:
        there = {f"/load/{name}" for name in await witness.children("/load")}
        assert set(load.confirmed) <= there
        assert there <= set(load.confirmed) | set(load.unknown)
        assert await witness.get("/owner") is not None
    assert len(set(load.ids)) == len(load.ids)
    assert load.ids == sorted(load.ids)
    print(f"{fault.__name__}: {len(load.confirmed)} confirmed, {len(load.unknown)} unknown, "
          f"longest pause {load.longest_s:.2f} s")  # fmt: skip
    if fault is pause:
        leader.resume()
    await store.close()


async def test_rule_31_without_a_quorum_sessions_are_lost_and_the_store_goes_on_after_it(
    ensemble: Ensemble, root: str
) -> None:
    store = await open_store(root, make_root=True)
    session = await store.open_session(2)
    await store.create("/owner", b"", session=session)
    lost = asyncio.Event()
    session.when_lost(lost.set)
    for server in ensemble.servers[:2]:
        server.kill()
    write = asyncio.ensure_future(store.create("/after", b""))
    await lost.wait()
    with pytest.raises(AlreadyClosed):
        await store.create("/no", b"", session=session)
    for server in ensemble.servers[:2]:
        server.start()
    try:
        await write
    except ConnectionLost:  # it was on its way; whether it arrived must be read
        if await store.get("/after") is None:
            await store.create("/after", b"")
    assert await store.children("/") in (["after"], ["after", "owner"])
    session = await store.open_session(2)
    while True:
        try:
            await store.create("/owner", b"", session=session)
            break
        except AlreadyExists:  # the servers have not ended the old one yet
            await asyncio.sleep(0.05)
    await store.close()


async def test_rule_31_a_server_that_dies_with_what_its_leader_has_not_heard(
    ensemble: Ensemble, tmp_path: Path
) -> None:
    """A follower reports sessions to its leader twice a tick: one may end earlier than its last answer suggests."""
    leader = ensemble.leader()
    follower = next(server for server in ensemble.servers if server is not leader)
    await (await open_store(f"{ensemble.url}/{tmp_path.name}", make_root=True)).close()
    async with opened(f"zk://{leader.address}/{tmp_path.name}") as witness:
        store = await open_store(f"zk://{follower.address}/{tmp_path.name}")
        session = await store.open_session(3)
        await store.create("/owner", b"", session=session)
        gone = asyncio.Event()

        async def look() -> None:
            if await witness.get("/owner") is None:
                gone.set()
                assert session.lost

        looks: list[asyncio.Future[None]] = []
        witness.watch("/owner", lambda _: looks.append(asyncio.ensure_future(look())))
        for number in range(5):  # answered right before the end
            await store.create(f"/owner-{number}", b"", session=session)
        follower.kill()
        await gone.wait()
        await asyncio.gather(*looks)
        await store.close()


async def test_what_one_session_wrote_another_of_the_same_store_reads(root: str) -> None:
    """The two are connected to different servers, and the plain one may be behind."""
    store = await open_store(root, make_root=True)
    sessions = [await store.open_session(20) for _ in range(3)]
    await store.create("/plain", b"")
    for number in range(300):
        path = f"/node-{number}"
        await store.create(path, b"%d" % number, session=sessions[number % 3])
        assert await store.get(path) == (b"%d" % number, 0)
        await store.put("/plain", b"", version=number)
    async with opened(root) as other:
        assert len(await other.children("/")) == 301
        with pytest.raises(VersionConflict):
            await other.put("/plain", b"", version=299)
    await store.close()
