"""What a mistaken operator sees: one error that names the setting, the host and the cure."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from magnetar.metadata.zookeeper.store import ZooKeeperSettings
from magnetar.proto.errors import (
    InvalidArgument,
    InvalidSetting,
    MagnetarError,
    NotAuthorized,
    ServiceNotReady,
)
from support.service import held_port
from support.zookeeper import Ensemble, open_store, opened
from support.zookeeper_line import ZooKeeperLine

pytestmark = pytest.mark.integration

IMPATIENT = ZooKeeperSettings(session_timeout_s=4, open_timeout_s=3.0, request_timeout_s=1.5)


async def test_hosts_that_cannot_be_reached() -> None:
    port = held_port(test_hosts_that_cannot_be_reached)
    with pytest.raises(ServiceNotReady) as failure:
        await open_store(f"zk://me:secret@127.0.0.1:{port},[::1]:{port}/root", settings=IMPATIENT)
    message = failure.value.message
    assert message.startswith("setting metadata: no ZooKeeper server of zk://me@127.0.0.1:")
    assert f"127.0.0.1:{port}: " in message
    assert f"[::1]:{port}: " in message
    assert "refused" in message
    assert "secret" not in message


async def test_a_host_name_that_nobody_knows() -> None:
    with pytest.raises(ServiceNotReady, match=r"nowhere\.invalid:2181: "):
        await open_store("zk://nowhere.invalid/root", settings=IMPATIENT)


@pytest.mark.real
async def test_a_host_that_says_nothing(zookeeper: Ensemble, line: ZooKeeperLine) -> None:
    line.hold()
    with pytest.raises(ServiceNotReady, match=rf"{line.port}: (no answer yet|it did not answer in time)"):
        await open_store(f"zk://{line.address}", settings=IMPATIENT)
    async with opened(f"zk://{line.address},{zookeeper.hosts}") as store:
        assert await store.get("/a") is None, "one of two is enough"


@pytest.mark.real
async def test_a_root_that_is_not_there(zookeeper: Ensemble) -> None:
    with pytest.raises(
        InvalidSetting, match=r"setting metadata: .* has no node /not/there; .*magnetar cluster init"
    ):
        await open_store(f"{zookeeper.url}/not/there")


@pytest.mark.real
async def test_credentials(zookeeper: Ensemble) -> None:
    """Nodes of a store with credentials are nobody else's."""
    hosts = zookeeper.hosts
    mine = await open_store(f"zk://me:pass%2Fword@{hosts}/private", make_root=True)
    await mine.create("/a/b", b"mine")
    session = await mine.open_session(4)
    await mine.create("/e", b"", session=session)
    assert await mine.next_id("ids") == 0
    for wrong in (f"zk://me:wrong@{hosts}/private", f"zk://{hosts}/private"):
        with pytest.raises(
            InvalidSetting, match=r"setting metadata: .* refuses its root /private to these credentials"
        ):
            await open_store(wrong)
    async with opened(f"zk://{hosts}") as everybody:
        for call in (
            everybody.get("/private/a/b"), everybody.children("/private/a"), everybody.create("/private/x", b""),
            everybody.put("/private/a/b", b"", version=0), everybody.delete("/private/a/b"),
        ):  # fmt: skip
            with pytest.raises(NotAuthorized, match="setting metadata"):
                await call
    await mine.close()


@pytest.mark.real
async def test_a_store_without_any_connection_says_that_nothing_was_sent(
    root: str, line: ZooKeeperLine
) -> None:
    store = await open_store(f"zk://{line.address}{root}", settings=IMPATIENT)
    line.hold()
    line.cut()
    while store._main.connection is not None:
        await asyncio.sleep(0)
    calls = (store.create("/a", b""), store.get("/a"), store.open_session(4), store.next_id("a"))
    for failure in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(failure, MagnetarError)
        assert "nothing was sent (127.0.0.1:" in str(failure)
        assert failure.retryable
    line.heal()
    assert await store.children("/") == []
    await store.close()


@pytest.mark.real
async def test_a_tree_without_a_root_of_its_own(zookeeper: Ensemble) -> None:
    async with opened(zookeeper.url) as store:
        await store.create("/top/below", b"1")
        assert "zookeeper" not in await store.children("/")
        assert "top" in await store.children("/", limit=1000)
        await store.delete("/top/below")
        assert "top" not in await store.children("/")


@pytest.mark.real
async def test_ipv6(zookeeper: Ensemble, root: str) -> None:
    try:
        line = ZooKeeperLine(zookeeper.servers[0].port, "::1")
        await line.__aenter__()
    except OSError:
        pytest.skip("there is no IPv6 on this machine")
    async with opened(f"zk://{line.address}{root}") as store:
        assert await store.create("/a", b"") == 0
    await line.__aexit__()


@pytest.mark.real
async def test_tls(zookeeper: Ensemble, root: str, tmp_path: Path) -> None:
    """A line with a certificate of its own in front of the server, as an ensemble with TLS has."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl on this machine to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=zk", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate], check=True, capture_output=True,
    )  # fmt: skip
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate, key)
    trusted = ssl.create_default_context(cafile=str(certificate))
    async with ZooKeeperLine(zookeeper.servers[0].port, tls=served) as line:
        async with opened(f"zk+tls://{line.address}{root}", tls=trusted) as store:
            assert await store.create("/a", bytes(300_000)) == 0
            line.cut()
            assert await store.get("/a") == (bytes(300_000), 0)
        refused = await asyncio.gather(
            open_store(f"zk+tls://{line.address}{root}", settings=IMPATIENT),
            open_store(f"zk://{line.address}{root}", settings=IMPATIENT),
            open_store(f"zk+tls://{zookeeper.hosts}{root}", settings=IMPATIENT, tls=trusted),
            return_exceptions=True,
        )
    words = ("CERTIFICATE_VERIFY_FAILED", "closed the connection|did not answer|broke", "setting metadata")
    for error, wanted in zip(refused, words):
        assert isinstance(error, ServiceNotReady)
        assert re.search(wanted, str(error)), error


@pytest.mark.real
async def test_a_session_of_another_store(zookeeper: Ensemble, root: str) -> None:
    async with opened(zookeeper.url + root) as one, opened(zookeeper.url + root) as two:
        session = await one.open_session(4)
        with pytest.raises(InvalidArgument, match="none of this store's"):
            await two.create("/a", b"", session=session)
        await one.create("/e", b"", session=session)
        with pytest.raises(MagnetarError, match="belongs to a session"):
            await one.create("/e/below", b"")
