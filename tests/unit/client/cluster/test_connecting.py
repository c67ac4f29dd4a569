"""Which broker of a cluster a client connects to: several hosts, several addresses of a name, SRV records."""

import asyncio
import random
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import dns.asyncresolver
import pytest
import pytest_asyncio

from magnetar.client import ConnectionLost, InvalidArgument, connect
from magnetar.client.connection.brokers import hosts_of
from magnetar.client.connection.calls import SharedCalls, first_success
from magnetar.client.service_url import ServiceUrl
from magnetar.proto.errors import AuthenticationFailed, MagnetarError
from support.client_kit import until
from support.dns_server import DnsServer
from support.fake_broker import FakeBroker
from support.fake_cluster import FakeCluster
from support.served_broker import serving
from support.sockets import counts_sockets, open_sockets


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster.of(3) as cluster:
        yield cluster


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Nobody listens there, and nobody else gets it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Connections are accepted there, and nothing is ever said."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


# --- several hosts --------------------------------------------------------------------------------------------------------


async def test_any_host_that_answers_will_do(
    cluster: FakeCluster, closed_port: int, silent_port: int
) -> None:
    url = f"magnetar://127.0.0.1:{closed_port},127.0.0.1:{silent_port},127.0.0.1:{cluster.brokers[0].port}"
    for seed in range(6):
        async with asyncio.timeout(5), connect(url, rng=random.Random(seed)) as client:
            assert await client.admin.list_topics() == []
            assert client.service_url == url


async def test_brokers_that_are_gone_are_not_remembered_for_ever(cluster: FakeCluster) -> None:
    async with connect(cluster.url) as client:
        brokers = client._pool._brokers
        for broker in cluster.brokers * 2:
            connection = await brokers.to(("127.0.0.1", broker.port))
            await connection.close(1.0)
        assert len(brokers._open) == 1


async def test_if_no_host_answers_the_error_names_all(closed_port: int, silent_port: int) -> None:
    url = f"magnetar://127.0.0.1:{closed_port},127.0.0.1:{silent_port}"
    with pytest.raises(ConnectionLost) as caught:
        await connect(url, connect_timeout=0.2)
    assert str(closed_port) in caught.value.message
    assert str(silent_port) in caught.value.message


async def test_clients_spread_over_the_hosts(cluster: FakeCluster) -> None:
    chosen: Counter[int] = Counter()
    for seed in range(60):
        async with connect(cluster.url, rng=random.Random(seed)):
            chosen.update(broker.number for broker in cluster.brokers if broker.handlers)
        await until(lambda: not any(broker.handlers for broker in cluster.brokers))
    assert min(chosen[number] for number in range(3)) >= 10
    assert sum(chosen.values()) == 60


async def test_a_host_that_failed_is_tried_after_the_others(cluster: FakeCluster) -> None:
    async with connect(cluster.url, backoff_first=0.01) as client:
        for _ in range(5):
            [host] = [broker for broker in cluster.brokers if broker.handlers]
            host.cut()
            await until(lambda: not any(broker.handlers for broker in cluster.brokers))
            await client.admin.list_topics()
        [host] = [broker for broker in cluster.brokers if broker.handlers]
        cluster.fail(host.number)
        others = [broker for broker in cluster.brokers if broker is not host]
        for _ in range(10):
            await until(lambda: not any(broker.handlers for broker in cluster.brokers))
            await client.admin.list_topics()
            [now] = [broker for broker in cluster.brokers if broker.handlers]
            assert now in others
            now.cut()


async def test_what_is_not_retryable_is_the_error(cluster: FakeCluster) -> None:
    async def refused() -> int:
        raise AuthenticationFailed("no")

    async def lost() -> int:
        raise ConnectionLost("nobody")

    with pytest.raises(AuthenticationFailed):
        await first_success([lost, refused, lost], 1.0)


# --- several addresses of a name ------------------------------------------------------------------------------------------


def resolves(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> list[str]:
    """Names stand for these addresses from now on; the list gets the names that are asked for."""
    asked = []

    async def getaddrinfo(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", getaddrinfo)
    return asked


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_all_addresses_of_a_name_are_tried(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = resolves(monkeypatch, ["127.0.0.3", "127.0.0.2", "127.0.0.1"])
    for seed in range(6):
        async with connect(
            f"magnetar://brokers.example.org:{cluster.brokers[0].port}", rng=random.Random(seed)
        ) as client:
            await client.admin.list_topics()
    assert asked == ["brokers.example.org"] * 6


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves(monkeypatch, [])
    with pytest.raises(ConnectionLost, match=r"cannot connect to nowhere:7650: .*is the name right"):
        await connect("magnetar://nowhere")


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_a_name_that_no_dns_could_have() -> None:
    with pytest.raises(ConnectionLost, match="is the name right"):
        await connect(f"magnetar://{63 * 'ü'}", connect_timeout=5.0)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_no_address_of_a_name_answers(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    resolves(monkeypatch, ["127.0.0.2", "127.0.0.3"])
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.[23]:\d+.*; .*127\.0\.0\.[23]:"):
        await connect(f"magnetar://name:{closed_port}")


# --- SRV records ----------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def dns_server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DnsServer]:
    """What this process resolves SRV records with."""
    async with DnsServer.start() as server:
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], server.port
        monkeypatch.setattr(dns.asyncresolver, "default_resolver", resolver)
        yield server


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_srv_records_say_which_hosts_there_are(
    cluster: FakeCluster, dns_server: DnsServer, closed_port: int
) -> None:
    name = "_magnetar._tcp.example.org"
    first, second, _ = cluster.brokers
    dns_server.records[name] = [(10, 5, closed_port, "127.0.0.1"), (20, 5, first.port, "127.0.0.1")]
    async with connect("magnetar+srv://example.org", backoff_first=0.01) as client:
        await client.admin.list_topics()
        assert first.handlers
        assert client.service_url == "magnetar+srv://example.org"
        # They are asked for again when the broker is gone.
        dns_server.records[name] = [(10, 5, second.port, "127.0.0.1")]
        cluster.fail(0)
        await client.admin.list_topics()
        assert second.handlers
        # What was known before is used while DNS does not answer.
        dns_server.records.clear()
        second.cut()
        await client.admin.list_topics()
    assert set(dns_server.asked) == {name}


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_without_srv_records_the_error_says_what_was_asked_for(dns_server: DnsServer) -> None:
    with pytest.raises(
        ConnectionLost, match=r"no SRV records of _magnetar\._tcp\.example\.org: .*name in magnetar\+srv"
    ):
        await connect("magnetar+srv://example.org")
    dns_server.silent = True
    with pytest.raises(ConnectionLost, match="no SRV records"):
        await connect("magnetar+srv://example.org", connect_timeout=0.1)


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_srv_records_by_priority_and_weight(dns_server: DnsServer) -> None:
    dns_server.records["_magnetar._tcp.x"] = [
        (2, 1, 4, "later"), (1, 90, 1, "heavy"), (1, 10, 2, "light"), (1, 0, 3, "never"),
    ]  # fmt: skip
    firsts: Counter[str] = Counter()
    for seed in range(200):
        hosts = await hosts_of(ServiceUrl(srv_name="x"), random.Random(seed), 5.0)
        assert hosts[3] == ("later", 4)
        firsts[hosts[0][0]] += 1
    assert 160 < firsts["heavy"] < 195
    assert firsts["never"] <= 2


async def test_without_dnspython_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name == "dns" or name.startswith("dns.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "dns", None)
    with pytest.raises(InvalidArgument, match=r"dnspython, .*pip install 'magnetar\[srv\]'"):
        connect("magnetar+srv://example.org")


# --- calls that are shared ------------------------------------------------------------------------------------------------


async def test_shared_calls_end_with_the_last_who_waits() -> None:
    calls = SharedCalls[str, int]("test")
    began, ended = [], []

    async def call() -> int:
        began.append(1)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(1)
        return 7

    waiting = [asyncio.ensure_future(calls.get("key", call)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for number, one in enumerate(waiting):
        assert (len(began), len(ended), len(calls)) == (1, 0, 1), number
        one.cancel()
        await asyncio.wait([one])
    await calls.wait_ended()
    assert (len(ended), len(calls)) == (1, 0)
    stopped = asyncio.ensure_future(calls.get("key", call))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    calls.stop()
    with pytest.raises(ConnectionLost, match="was stopped"):
        await stopped


@counts_sockets
async def test_what_loses_a_race_leaves_no_socket(cluster: FakeCluster, silent_port: int) -> None:
    before = open_sockets()
    for seed in range(4):
        url = f"magnetar://127.0.0.1:{silent_port},{cluster.url.removeprefix('magnetar://')}"
        async with connect(url, rng=random.Random(seed)) as client:
            await client.admin.list_topics()
    for broker in cluster.brokers:
        await until(lambda broker=broker: not broker.handlers)
    assert len(open_sockets() - before) == 0


async def test_the_losers_of_a_race_are_discarded() -> None:
    discarded: list[int] = []
    gate = asyncio.Event()

    async def call(number: int) -> int:
        await gate.wait()
        return number

    race = asyncio.ensure_future(
        first_success([lambda: call(1), lambda: call(2)], 0.0, discard=discarded.append)
    )
    await asyncio.sleep(0.01)
    gate.set()
    assert [await race, *discarded] == [1, 2]


async def test_one_connection_to_a_broker_that_was_asked_and_serves(broker: FakeBroker) -> None:
    async with connect(broker.url) as client:
        await asyncio.gather(*[client.create_producer(f"t{number}") for number in range(20)])
        assert len(broker.handlers) == 1


async def test_a_client_that_was_never_connected_leaves_nothing(closed_port: int) -> None:
    tasks = asyncio.all_tasks()
    for _ in range(3):
        with pytest.raises(MagnetarError):
            await connect(f"magnetar://127.0.0.1:{closed_port}")
    assert asyncio.all_tasks() == tasks


# --- real brokers ---------------------------------------------------------------------------------------------------------


async def test_real_brokers_of_two_clusters_behind_urls_with_several_hosts(closed_port: int) -> None:
    async with serving() as rome, serving() as oslo:
        urls = [f"magnetar://127.0.0.1:{closed_port},127.0.0.1:{one.addresses[0][1]}" for one in (rome, oslo)]
        async with connect(urls[0], backoff_first=0.01, operation_timeout=5.0) as client:
            producer = await client.create_producer("t")
            consumer = await client.subscribe("t", "s", start="earliest", type="shared")
            await producer.send_many([b"rome %d" % number for number in range(10)])
            old = [await consumer.receive(5.0) for _ in range(10)]
            await client.switch_to(urls[1])
            await producer.send_many([b"oslo %d" % number for number in range(10)])
            await consumer.ack(old)
            new = [(await consumer.receive(5.0)).value for _ in range(10)]
            assert new == [b"oslo %d" % number for number in range(10)]
            stats = await client.admin.topic_stats("t")
            assert stats["stored_messages"] == 10
            assert stats["subscriptions"]["s"]["backlog_messages"] == 10, "of rome's ids, nothing came here"
            await client.admin.create_topic("u")
            assert len(await client.admin.list_topics()) == 2
