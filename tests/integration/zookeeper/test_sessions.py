"""Sessions on a real ZooKeeper: what aiozk's session layer gets wrong, each as a test of ours.

The shared server's tick is 0.5 s, so a session lasts 1 s at least, and the servers end it up to one tick later.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from magnetar.metadata import Create, MetadataStore
from magnetar.metadata.zookeeper.connection import MAX_PENDING
from magnetar.metadata.zookeeper.store import ZooKeeperSettings
from magnetar.metadata.zookeeper.wire import Opcode
from magnetar.proto.errors import AlreadyClosed, AlreadyExists, ConnectionLost, MagnetarError, VersionConflict
from support.zookeeper import Ensemble, open_store, opened
from support.zookeeper_line import ZooKeeperLine

pytestmark = [pytest.mark.integration, pytest.mark.real]

SHORT = ZooKeeperSettings(session_timeout_s=1.0, open_timeout_s=60, request_timeout_s=60)


async def eventually(condition: object) -> None:
    """Until the call returns something true."""
    assert callable(condition)
    while not condition():
        await asyncio.sleep(0.01)


async def test_a_broken_connection_fails_requests_at_once_and_the_session_goes_on(
    zookeeper: Ensemble, root: str, line: ZooKeeperLine
) -> None:
    """aiozk notices it after the whole timeout, and its requests hang."""
    async with (
        opened(f"zk://{line.address}{root}") as store,
        opened(zookeeper.url + root) as other,
    ):
        session = await store.open_session(8)
        await store.create("/mine", b"", session=session)
        await store.create("/a", b"0")
        line.hold()
        read = asyncio.ensure_future(store.get("/a"))
        write = asyncio.ensure_future(store.put("/a", b"1", version=0))
        await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        line.cut()
        line.heal()
        with pytest.raises(ConnectionLost, match="may have been done"):
            await write
        assert await read is not None, "a read is sent again"
        await store.create("/also-mine", b"", session=session)
        assert not session.lost
        assert await other.children("/") == ["a", "also-mine", "mine"]


async def test_rule_31_a_partition_is_a_lost_session_before_the_server_ends_it(
    zookeeper: Ensemble, root: str, line: ZooKeeperLine
) -> None:
    """aiozk never turns a partition into a lost session. The order is what counts: lost here, then gone there."""
    async with (
        opened(f"zk://{line.address}{root}", settings=SHORT) as store,
        opened(zookeeper.url + root) as witness,
    ):
        session = await store.open_session(3)
        await store.create("/owner", b"", session=session)
        lost, gone = asyncio.Event(), asyncio.Event()
        session.when_lost(lost.set)

        async def look() -> None:
            if await witness.get("/owner") is None:
                gone.set()
                assert session.lost, "whoever is told that it is gone finds it lost, however late it asks"

        looks: list[asyncio.Future[None]] = []
        witness.watch("/owner", lambda _: looks.append(asyncio.ensure_future(look())))
        assert await witness.get("/owner") is not None
        line.hold()
        await lost.wait()
        assert session.lost
        with pytest.raises(AlreadyClosed, match="no server answered in time"):
            await store.create("/owner-2", b"", session=session)
        await gone.wait()
        line.heal()
        await store.create("/owner", b"again", session=await store.open_session(2))
        assert session.lost, "for good"
        await asyncio.gather(*looks)


async def test_nothing_asked_of_a_session_is_done_in_another(
    zookeeper: Ensemble, root: str, line: ZooKeeperLine
) -> None:
    """aiozk runs what was queued while suspended in the next session."""
    async with (
        opened(f"zk://{line.address}{root}", settings=SHORT) as store,
        opened(zookeeper.url + root) as witness,
    ):
        session = await store.open_session(1)
        line.hold()
        line.cut()
        await eventually(lambda: store._main.connection is None and session.connection is None)
        created = asyncio.ensure_future(store.create("/ephemeral", b"", session=session))
        plain = asyncio.ensure_future(store.create("/plain", b""))
        await eventually(lambda: session.lost)
        with pytest.raises((AlreadyClosed, ConnectionLost)):
            await created
        line.heal()
        assert await plain == 0, "this one belongs to no session, and had not been sent"
        assert await witness.children("/") == ["plain"]
        again = await store.open_session(1)
        assert again.session_id != session.session_id
        with pytest.raises(AlreadyClosed):
            await store.create("/ephemeral", b"", session=session)


@pytest.mark.parametrize("opcode", [Opcode.CREATE, Opcode.MULTI])
async def test_a_create_whose_answer_was_lost_is_not_sent_again(
    root: str, line: ZooKeeperLine, opcode: Opcode
) -> None:
    """aiozk's policy sends it again and reports NodeExists for one's own node."""
    path = "/a" if opcode is Opcode.CREATE else "/parent/a"
    async with opened(f"zk://{line.address}{root}") as store:
        line.lose_answer(opcode)
        with pytest.raises(ConnectionLost, match="may have been done"):
            await store.create(path, b"mine")
        assert line.lost_answers == 1
        assert await store.get(path) == (b"mine", 0)
        with pytest.raises(AlreadyExists):
            await store.create(path, b"mine")


async def test_a_put_whose_answer_was_lost_is_not_sent_again(root: str, line: ZooKeeperLine) -> None:
    """aiozk reports BadVersion for one's own write."""
    async with opened(f"zk://{line.address}{root}") as store:
        await store.create("/a", b"0")
        line.lose_answer(Opcode.SET_DATA)
        with pytest.raises(ConnectionLost):
            await store.put("/a", b"1", version=0)
        assert await store.get("/a") == (b"1", 1)


async def test_a_draw_whose_answer_was_lost_leaves_a_gap(root: str, line: ZooKeeperLine) -> None:
    """aiozk makes two sequential nodes of one request."""
    async with opened(f"zk://{line.address}{root}") as store:
        drawn = [await store.next_id("ledgers") for _ in range(2)]
        line.lose_answer(Opcode.SET_DATA)
        drawn += [await store.next_id("ledgers", 3), await store.next_id("ledgers")]
        assert drawn == [0, 1, 5, 8]


async def test_watches_of_everything_are_armed_again(
    zookeeper: Ensemble, root: str, line: ZooKeeperLine
) -> None:
    """aiozk does not arm watches for deletion again. Here the session itself ends meanwhile."""
    async with (
        opened(f"zk://{line.address}{root}", settings=SHORT) as store,
        opened(zookeeper.url + root) as other,
    ):
        for path in ("/changed", "/deleted", "/parent/child"):
            await other.create(path, b"")
        calls: list[str] = []
        for path in ("/changed", "/deleted", "/parent", "/not-there/yet"):
            store.watch(path, calls.append)
        assert await store.get("/deleted") is not None
        first = store._main.session_id
        line.hold()
        await eventually(lambda: store._main.session_id != first)
        await other.delete("/deleted")
        line.heal()
        await eventually(lambda: {"/changed", "/deleted", "/parent", "/not-there/yet"} <= set(calls))
        for change, path in (
            (other.put("/changed", b"1", version=0), "/changed"),
            (other.create("/deleted", b""), "/deleted"),
            (other.put("/parent/child", b"1", version=0), "/parent"),
            (other.create("/not-there/yet", b""), "/not-there/yet"),
        ):
            calls.clear()
            await change
            await eventually(lambda path=path: path in calls)


async def test_connections_that_break_while_watches_are_armed(
    zookeeper: Ensemble, root: str, line: ZooKeeperLine
) -> None:
    """aiozk's repair loop deadlocks."""
    count = 3000
    async with (
        opened(f"zk://{line.address}{root}") as store,
        opened(zookeeper.url + root) as other,
    ):
        calls: dict[str, int] = {}

        def called(path: str) -> None:
            calls[path] = calls.get(path, 0) + 1

        watches = [store.watch(f"/n/{number}", called) for number in range(count)]
        assert await store.get("/n/0") is None
        for _ in range(8):
            connections = line.connections
            line.cut()
            await eventually(lambda seen=connections: line.connections > seen)
            await asyncio.sleep(0.003)  # somewhere in the middle: where does not matter
        await eventually(lambda: len(calls) == count)
        calls.clear()
        for number in (0, count // 2, count - 1):
            await other.create(f"/n/{number}", b"")
        await eventually(lambda: set(calls) >= {f"/n/{number}" for number in (0, count // 2, count - 1)})
        for watch in watches:
            watch.close()
        calls.clear()
        await other.create("/n/7", b"")
        assert await store.get("/n/7") is not None
        assert calls == {}
        assert not store._watches._watches


async def test_what_is_too_large_is_refused_and_a_long_listing_arrives(
    root: str, zookeeper: Ensemble
) -> None:
    """For aiozk more than 1 MB looks like a timeout."""
    async with opened(zookeeper.url + root) as store:
        with pytest.raises(MagnetarError, match="at most 1000000"):
            await store.create("/a", bytes(1_000_001))
        with pytest.raises(MagnetarError, match="divide it"):
            await store.commit([Create(f"/{number}", bytes(600_000)) for number in range(2)])
        await store.create("/a", bytes(1_000_000))
        node = await store.get("/a")
        assert node is not None
        assert len(node.value) == 1_000_000
        names = [f"{number:0200d}" for number in range(22_000)]
        await store.create("/long/x", b"")
        await store.delete("/long/x")
        await store.create("/long", b"")
        for at in range(0, len(names), 2000):
            await store.commit([Create(f"/long/{name}", b"") for name in names[at : at + 2000]])
        assert await store.children("/long") == names, "4.4 MB"
        assert await store.children("/long", after=names[99], limit=2) == names[100:102]


async def test_requests_beyond_a_bound_wait_for_their_turn(root: str, line: ZooKeeperLine) -> None:
    async with opened(f"zk://{line.address}{root}") as store:
        await store.create("/a", b"")
        line.hold()
        calls = [asyncio.ensure_future(store.get("/a")) for _ in range(3 * MAX_PENDING)]
        connection = store._main.connection
        assert connection is not None
        await eventually(lambda: connection.pending == MAX_PENDING)
        for call in calls[::2]:
            call.cancel()
        line.heal()
        assert set(await asyncio.gather(*calls[1::2])) == {(b"", 0)}
        line.hold()
        writes = [asyncio.ensure_future(store.put("/a", b"", version=7)) for _ in range(2 * MAX_PENDING)]
        await asyncio.sleep(0.1)
        line.cut()
        line.heal()
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert {type(result) for result in results} <= {ConnectionLost, VersionConflict}


async def test_cancelled_calls_leave_nothing_behind(root: str, line: ZooKeeperLine) -> None:
    async with opened(f"zk://{line.address}{root}") as store:
        await store.create("/a", b"")
        line.hold()
        calls: list[asyncio.Future[Any]] = [asyncio.ensure_future(store.get("/a")) for _ in range(500)]
        calls += [asyncio.ensure_future(store.next_id("ids")) for _ in range(5)]
        await asyncio.sleep(0.02)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        line.heal()
        assert await store.get("/a") == (b"", 0)
        assert await store.next_id("ids") >= 0
        connection = store._main.connection
        assert connection is not None
        assert connection.pending == 0
        assert not store._sequences._waiting
        assert not store._sequences._drawing


async def test_closing_with_requests_outstanding(root: str, line: ZooKeeperLine) -> None:
    others = asyncio.all_tasks()
    store = await open_store(f"zk://{line.address}{root}", settings=SHORT)
    await store.create("/a", b"")
    session = await store.open_session(1)
    line.hold()
    calls = [
        asyncio.ensure_future(call)
        for call in (
            store.get("/a"), store.put("/a", b"", version=0), store.children("/"), store.next_id("ids"),
            store.create("/b", b"", session=session), store.open_session(1),
        )
    ]  # fmt: skip
    await asyncio.sleep(0.02)
    await store.close()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, AlreadyClosed | ConnectionLost), result
    assert not session.lost, "its owner closed it"
    left = {task for task in asyncio.all_tasks() - others if "zookeeper_line" not in repr(task)}
    assert not left


async def test_the_clock_decides_before_any_timer(root: str, zookeeper: Ensemble) -> None:
    """A laptop that slept, a virtual machine that was moved: no turn of the loop was in between."""
    now = [0.0]
    async with opened(zookeeper.url + root, clock=lambda: now[0]) as store:
        session = await store.open_session(4)
        found = []
        for now[0] in (0.0, 2.6, 2.7, 0.0):
            found.append(session.lost)
        assert found == [False, False, True, True], "after 2/3 of 4 s, and never false again"
        assert await store.get("/a") is None, "the store goes on"


CHILD = """
import asyncio, os, random, sys
from magnetar.metadata.zookeeper.store import open_zookeeper_store
from magnetar.runtime.clock import elapsed_s

async def main(url):
    store = await open_zookeeper_store(url, rng=random.Random(1), clock=elapsed_s)
    session = await store.open_session(3)
    await store.create("/child", b"", session=session)
    session.when_lost(lambda: print("when_lost", flush=True))
    print("ready", flush=True)
    # No turn of the loop from here on: neither a timer nor a server tells of the loss before the question.
    while not os.path.exists(sys.argv[2]):
        pass
    assert session.lost
    print("lost", flush=True)
    await store.create("/went-on", b"")
    await store.close()

import uvloop
uvloop.run(main(sys.argv[1]))
"""


async def test_a_process_that_was_stopped_finds_its_session_lost_first_of_all(
    zookeeper: Ensemble, root: str, tmp_path: Path
) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    expired = tmp_path / "expired"
    async with opened(zookeeper.url + root) as witness:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            str(tmp_path / "child.py"),
            zookeeper.url + root,
            str(expired),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            assert await child.stdout.readline() == b"ready\n"
            os.kill(child.pid, signal.SIGSTOP)
            while await witness.get("/child") is not None:
                await asyncio.sleep(0.05)
            expired.touch()
            os.kill(child.pid, signal.SIGCONT)
            output = (await child.stdout.read()).decode().split("\n")
            assert sorted(output) == ["", "lost", "when_lost"]
            assert await child.wait() == 0
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()


async def test_two_stores_and_one_version(root: str, zookeeper: Ensemble) -> None:
    """All compare-and-sets of many writers: each version is won once."""
    async with (
        opened(zookeeper.url + root) as one,
        opened(zookeeper.url + root) as two,
    ):
        await one.create("/counter", b"0")
        drawn: list[int] = []

        async def count(store: MetadataStore) -> None:
            for _ in range(25):
                while True:
                    node = await store.get("/counter")
                    assert node is not None
                    try:
                        await store.put("/counter", b"%d" % (int(node.value) + 1), version=node.version)
                        break
                    except VersionConflict:
                        pass

        async def draw(store: MetadataStore) -> None:
            mine = [await store.next_id("ids") for _ in range(50)]
            assert mine == sorted(mine)
            drawn.extend(mine)

        await asyncio.gather(
            *[count(store) for store in (one, two)], *[draw(store) for store in (one, two, one, two)]
        )
        assert await two.get("/counter") == (b"50", 50)
        assert len(set(drawn)) == 200


async def test_a_shared_server_that_died_is_started_again_for_the_next_test(
    root: str, zookeeper: Ensemble
) -> None:
    """Regression: the kernel killed one, and with it failed 33 tests that came after."""
    async with opened(zookeeper.url + root) as store:
        await store.create("/a", b"")
    (server,) = zookeeper.servers
    os.kill(server.pid, signal.SIGKILL)
    while server.running:
        await asyncio.sleep(0.01)
    async with opened(zookeeper.url + root) as store:
        assert await store.get("/a") == (b"", 0)
