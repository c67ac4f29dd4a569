"""The order and the conditions of a rolling restart, on metadata in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from magnetar.broker.ownership.records import BrokerLoad, BrokerRecord, OwnerRecord
from magnetar.cli.cluster import restart as cluster_restart
from magnetar.cli.cluster.members import Group, Member, obstacles, plan, read_members, refusals
from magnetar.cli.cluster.restart import Commands, fill, restart
from magnetar.ledger import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.directory import encode_registration
from magnetar.ledger.replication.core.request import Reason, RepairRequest
from magnetar.ledger.replication.queue import UnderreplicatedLedgers
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import InvalidArgument, ServiceNotReady
from support.memory_metadata import MemoryMetadataStore


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_restart, "_POLL_S", 0.005)


async def register(store: MemoryMetadataStore, name: str, run: int, zone: str = "") -> None:
    """A bookie's node, made or replaced."""
    value = encode_registration(f"{name}:3181", incarnation=run, zone=zone)
    node = await store.get(f"/bookies/{name}")
    if node is None:
        await store.create(f"/bookies/{name}", value)
    else:
        await store.put(f"/bookies/{name}", value, version=node.version)


async def cluster(names: str = "b1 b2 b3") -> MemoryMetadataStore:
    store = MemoryMetadataStore()
    for name in names.split():
        await store.create(f"/cookies/{name}", b"")
        await register(store, name, 1)
    broker = BrokerRecord("magnetar://h:7650", "", "", "ready", 5, "0", BrokerLoad(), {})
    await store.create("/brokers/x", msgspec.msgpack.encode(broker))
    return store


def member(kind: str, name: str, state: str = "writable") -> Member:
    return Member(kind, name, "h", 1, state, 1)


def names(groups: list[Group]) -> list[str]:
    return [f"{group}: {' '.join(one.name for one in group.members)}" for group in groups]


async def register_broker(store: MemoryMetadataStore, name: str, run: int, zone: str = "") -> None:
    record = BrokerRecord(f"magnetar://{name}:7650", zone, "", "ready", run, "0", BrokerLoad(), {})
    value = msgspec.msgpack.encode(record)
    node = await store.get(f"/brokers/{name}")
    if node is None:
        await store.create(f"/brokers/{name}", value)
    else:
        await store.put(f"/brokers/{name}", value, version=node.version)


async def zones() -> MemoryMetadataStore:
    """Three zones of a bookie and a broker each, in turn on machines of their own: a1, b1, c1 and xa, xb, xc."""
    store = MemoryMetadataStore()
    for zone in "abc":
        await store.create(f"/cookies/{zone}1", b"")
        await register(store, f"{zone}1", 1, zone)
        await register_broker(store, f"x{zone}", 1, zone)
    return store


async def ledger(
    store: MemoryMetadataStore, bookies: str, quorums: tuple[int, int], **properties: str
) -> int:
    """Open, on these bookies."""
    ledgers = StoredLedgers(store)
    ledger_id = await ledgers.new_ids()
    striping = Striping(len(bookies.split()), *quorums)
    metadata = LedgerMetadata.create(striping, tuple(bookies.split()), 0, properties)
    await ledgers.create(ledger_id, metadata.encode())
    return ledger_id


async def test_the_plan_has_bookies_before_brokers_and_only_what_was_asked_for() -> None:
    members = await read_members(await cluster())
    assert names(plan(members, [])) == ["bookie b1: b1", "bookie b2: b2", "bookie b3: b3", "broker x: x"]
    assert names(plan(list(reversed(members)), ["x", "b2"])) == ["bookie b2: b2", "broker x: x"]
    assert names(plan(members, ["broker"])) == ["broker x: x"]
    assert [(one.members[0].host, one.members[0].port) for one in plan(members, ["x"])] == [("h", 7650)]
    with pytest.raises(InvalidArgument, match="no daemon b9 in this cluster; it has b1, b2, b3, x"):
        plan(members, ["b9"])
    with pytest.raises(InvalidArgument, match="--by rack is not known: it is daemon, machine, zone"):
        plan(members, [], "rack")
    with pytest.raises(InvalidArgument, match=r"bookie b1 does not say its zone, .* set bookie\.zone"):
        plan(members, [], "zone")


async def test_a_plan_by_zone_or_machine_has_what_belongs_together() -> None:
    store = await zones()
    members = await read_members(store)
    assert names(plan(members, [], "zone")) == ["zone a: a1 xa", "zone b: b1 xb", "zone c: c1 xc"]
    assert names(plan(members, ["b", "xc"], "zone")) == ["zone b: b1 xb", "zone c: xc"]
    assert names(plan(members, ["bookie"], "zone")) == ["zone a: a1", "zone b: b1", "zone c: c1"]
    assert names(plan(members, ["b1"], "machine")) == ["machine b1: b1"]
    with pytest.raises(InvalidArgument, match=r"no daemon d in this cluster; it has a1, .*, xc, a, b, c"):
        plan(members, ["d"], "zone")
    await store.delete("/bookies/a1")
    with pytest.raises(InvalidArgument, match=r"bookie a1 does not say its machine, .* it is not registered"):
        plan(await read_members(store), [], "machine")


@pytest.mark.parametrize(
    ("bookies", "quorums", "degraded", "refused"),
    [
        ("a1 b1 c1", (3, 2), "", []),
        ("a1 b1 c1", (3, 3), "", ["zone a", "zone b"]),  # b1 and b2 are the bookies of zone b
        ("a1 b1 b2", (3, 2), "", ["zone b"]),
        ("a1 b1 c1 b2", (2, 1), "", []),  # neighbours are of different zones
        ("a1 c1 b1 b2", (2, 1), "", ["zone b"]),
        ("b1 c1", (2, 2), "", ["zone b"]),
        ("b1 c1", (2, 2), "3/3/2", []),
        ("b1 b2", (2, 2), "3/3/2", ["zone b"]),
    ],
)
async def test_a_zone_is_not_stopped_that_has_more_copies_than_may_be_away(
    bookies: str, quorums: tuple[int, int], degraded: str, refused: list[str]
) -> None:
    store = await zones()
    await store.create("/cookies/b2", b"")
    await register(store, "b2", 1, "b")
    await ledger(store, "c1 a1 b1", (3, 2))
    properties = {"degraded_from": degraded} if degraded else {}
    ledger_id = await ledger(store, bookies, quorums, **properties)
    members = await read_members(store)
    found = await refusals(store, members, plan(members, ["a", "b"], "zone"))
    assert [text.partition(" cannot")[0] for text in found] == refused
    assert all(f"ledger {ledger_id} would be below its ack quorum" in text for text in found)
    assert not await refusals(store, members, plan(members, [])), "a daemon alone may always be stopped"


async def test_nothing_is_stopped_when_a_group_may_not_be() -> None:
    store = await zones()
    await ledger(store, "a1 c1", (2, 2))
    members = await read_members(store)
    with pytest.raises(
        InvalidArgument, match=r"zone a cannot .* more than 0 of the 2 copies .*; zone c cannot"
    ):
        await restart(store, plan(members, [], "zone"), Commands(("exit 3",)), 5, print)
    for name in ("xb", "xc"):
        await store.delete(f"/brokers/{name}")
    members = await read_members(store)
    (found,) = await refusals(store, members, plan(members, ["a"], "zone"))
    assert found == "zone a cannot be restarted together: no broker would be left to take over its topics"


@pytest.mark.real
async def test_a_zone_is_stopped_when_its_brokers_have_handed_over_and_gets_topics_back_afterwards(
    tmp_path: Path,
) -> None:
    store = await zones()
    log = tmp_path / "log"
    owner = "/owners/public/default/0x00000000_0xffffffff"
    await store.create(owner, OwnerRecord("xa", "magnetar://xa:7650", "", 1).encode())
    commands = Commands((f"echo stop {{name}} >> {log}", f"echo start {{zone}} >> {log}"))
    groups = plan(await read_members(store), ["a"], "zone")
    said: list[str] = []
    work = asyncio.create_task(restart(store, groups, commands, 20, said.append))

    async def until(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(10):
            while not await condition():
                await asyncio.sleep(0.005)

    async def draining() -> bool:
        return await store.children("/draining-brokers") == ["xa"]

    async def started() -> bool:
        return log.exists() and "start" in log.read_text()

    await until(draining)
    await asyncio.sleep(0.05)
    assert not log.exists(), "it still owns a bundle"
    await store.delete(owner)
    await until(started)
    assert await draining()
    await register(store, "a1", 2, "a")
    await register_broker(store, "xa", 2, "a")
    await work
    assert sorted(log.read_text().splitlines()) == ["start a", "stop a1", "stop xa"], "the same command once"
    assert said[0].startswith("[1/1] zone a (a1, xa): handed over in ")
    assert not await store.children("/draining-brokers")


async def test_a_broker_that_keeps_its_topics_is_not_stopped() -> None:
    store = await zones()
    owner = "/owners/public/default/0x00000000_0xffffffff"
    await store.create(owner, OwnerRecord("xa", "magnetar://xa:7650", "", 1).encode())
    groups = plan(await read_members(store), ["a"], "zone")
    with pytest.raises(
        ServiceNotReady, match=r"zone a is not stopped: xa did not hand over all topics in 0\.1 s"
    ):
        await restart(store, groups, Commands(("exit 3",)), 0.1, print)
    assert not await store.children("/draining-brokers")


def test_what_stands_in_the_way_is_named() -> None:
    expected = [member("bookie", "b1"), member("broker", "x", "ready")]
    assert obstacles(expected, expected, 0) == []
    assert obstacles(expected[:1], expected, 0) == ["broker x is not registered"]
    assert obstacles([member("bookie", "b1", "lost"), expected[1]], expected, 1200) == [
        "bookie b1 is lost",
        "1,200 ledgers wait for repair",
    ]
    assert obstacles([member("bookie", "b1", "stalled"), expected[1]], expected, 0) == [
        "bookie b1 is stalled"
    ]
    read_only = [member("bookie", "b1", "read-only"), member("broker", "x", "draining")]
    assert obstacles(read_only, expected, 0) == [], "an operator's wish is no reason to wait for ever"


def test_a_command_is_filled_in_safely() -> None:
    strange = Member("bookie", "a b;rm", "h", 3181, "", 1)
    assert (
        fill("restart {name} on {host}:{port} as {kind}", strange) == "restart 'a b;rm' on h:3181 as bookie"
    )
    assert fill("awk '{{print}}'", strange) == "awk '{print}'"
    for wrong in ("restart {nme}", "restart {", "restart {}"):
        with pytest.raises(InvalidArgument, match="cannot be filled in"):
            Commands((wrong,))


@pytest.mark.real
async def test_the_next_one_waits_until_the_one_before_is_registered_anew_and_nothing_is_to_repair(
    tmp_path: Path,
) -> None:
    store = await cluster()
    queue = UnderreplicatedLedgers(store)
    log = tmp_path / "log"
    said: list[str] = []
    chosen = plan(await read_members(store), ["b1", "b2"])
    work = asyncio.create_task(
        restart(store, chosen, Commands((f"echo {{name}} >> {log}",)), 20, said.append)
    )

    async def until_restarted(names: list[str]) -> None:
        async with asyncio.timeout(10):
            while not (log.exists() and log.read_text().split() == names):
                await asyncio.sleep(0.005)

    await until_restarted(["b1"])
    await asyncio.sleep(0.05)
    assert not said, "its old node does not count"
    await queue.add(7, RepairRequest({"b1": Reason.CHECK}))
    await register(store, "b1", 2)
    await asyncio.sleep(0.05)
    assert not said, "a ledger waits for repair"
    found = await queue.get(7)
    assert found is not None
    await queue.remove(7, found[1])
    await until_restarted(["b1", "b2"])
    assert [line.partition(":")[0] for line in said] == ["[1/2] bookie b1"]
    await register(store, "b2", 2)
    await work
    assert [line.partition(":")[0] for line in said[1:-1]] == ["[2/2] bookie b2"]


@pytest.mark.real
async def test_it_ends_at_what_is_not_well() -> None:
    store = await cluster()
    chosen = plan(await read_members(store), [])
    with pytest.raises(ServiceNotReady, match="`exit 3` ended with code 3; nothing else was restarted"):
        await restart(store, chosen, Commands(("exit 3",)), 5, print)
    with pytest.raises(ServiceNotReady, match=r"`sleep 60` did not end within 0\.1 s"):
        await restart(store, chosen, Commands(("sleep 60",)), 0.1, print)
    with pytest.raises(ServiceNotReady, match="bookie b1 was restarted and is not ready after 2 s"):
        await restart(store, chosen, Commands(("true",)), 2, print)
    await store.delete("/bookies/b3")
    with pytest.raises(ServiceNotReady, match="bookie b1 is not stopped: bookie b3 is lost"):
        await restart(store, chosen, Commands(("true",)), 0.1, print)
