"""A bookie is believed only as the one it was, and a metadata store only if it knows enough ledger ids (rules 35 and 36)."""

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from magnetar.bookie.directories import replace_cookie
from magnetar.bookie.layout import DataLayout
from magnetar.ledger import GivenIdentities, LedgerMetadata, LedgerReader, StaticBookies, TcpTransport
from magnetar.metadata.identity import registered_cookie
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.metadata.store import Versioned
from magnetar.metadata.timed import TimedStore
from magnetar.proto.bookie_identity import BookieIdentity
from magnetar.proto.errors import (
    LedgerFenced,
    MagnetarError,
    NotEnoughBookies,
    QuorumLost,
    UnknownLedgerState,
    WrongBookie,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.connection import ConnectionOptions
from magnetar.runtime.files import OsFiles
from support.bookie_kit import add, entry
from support.bookies import Confirmations
from support.connections import serving
from support.identity_kit import Client, Disk, Fleet
from support.memory_metadata import MemoryMetadataStore

NAMES = ("b1", "b2", "b3", "b4")
COUNT = 30


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path, *NAMES) as fleet:
        yield fleet


async def write(client: Client, count: int = COUNT) -> int:
    """A ledger that its writer leaves open, as a broker that is killed does; its id."""
    writer = await client.ledgers.create()
    confirmed = Confirmations()
    for number in range(count):
        writer.append(b"payload %d" % number, confirmed)
    await confirmed.count(count)
    assert not confirmed.errors
    return writer.ledger_id


async def read(reader: LedgerReader) -> list[bytes]:
    """All payloads."""
    found: list[bytes] = []
    while len(found) <= reader.last_add_confirmed:
        entries = await reader.read(len(found), reader.last_add_confirmed)
        found += [bytes(entry[LEDGER_ENTRY_HEADER_BYTES:]) for entry in entries]
    return found


def payloads(count: int = COUNT) -> list[bytes]:
    return [b"payload %d" % number for number in range(count)]


async def refusal(client: Client, bookie: str) -> str:
    with pytest.raises(WrongBookie) as caught:
        await client.transport.info(bookie)
    return caught.value.message


async def test_rule_35_the_first_contact_registers_bookie_and_cluster_durably(fleet: Fleet) -> None:
    client = await fleet.client()
    await client.transport.info("b1")
    bookie = fleet.bookies["b1"]
    registered = (await registered_cookie(fleet.metadata, "b1")).identity
    assert registered == BookieIdentity(
        bookie_id=bookie.cookie.bookie_id,
        instance=bookie.cookie.instance,
        start=1,
        incarnation=bookie.cookie.incarnations[-1],
    )
    assert bookie.cookie.cluster != 0
    await fleet.restart("b1")
    assert fleet.bookies["b1"].cookie.cluster == bookie.cookie.cluster
    await client.transport.info("b1")
    assert (await registered_cookie(fleet.metadata, "b1")).identity.start == 2


async def test_rule_35_an_emptied_bookie_is_refused_and_its_no_such_entry_never_counts(fleet: Fleet) -> None:
    first = await fleet.client()
    ledgers = [await write(first) for _ in range(10)]
    await first.close()
    await fleet.empty("b2")
    second = await fleet.client()
    for ledger_id in ledgers:
        assert await read(await second.ledgers.open(ledger_id, recover=True)) == payloads()
    text = await refusal(second, "b2")
    assert "--accept-new-disk" in text
    assert f"{fleet.bookies['b2'].cookie.instance:016x}" in text
    assert f"{(await registered_cookie(fleet.metadata, 'b2')).identity.instance:016x}" in text


async def test_rule_35_swapped_bookies_are_refused_until_they_are_put_right(fleet: Fleet) -> None:
    first = await fleet.client()
    ledgers = [await write(first) for _ in range(10)]
    await first.close()
    await fleet.swap("b1", "b3")
    # The backoff outlasts the test: a bookie that answers on one connection is to be reached on the others as well.
    second = await fleet.client(backoff_s=30.0)
    for bookie in ("b1", "b3"):
        assert "exchanged" in await refusal(second, bookie)
    for ledger_id in ledgers:
        with contextlib.suppress(QuorumLost, NotEnoughBookies):
            assert await read(await second.ledgers.open(ledger_id, recover=True)) == payloads()
    await fleet.swap("b1", "b3")
    for bookie in ("b1", "b3"):
        await second.transport.info(bookie)
    for ledger_id in ledgers:
        assert await read(await second.ledgers.open(ledger_id, recover=True)) == payloads()


async def test_rule_35_a_bookie_that_was_restored_from_an_older_copy_is_refused(fleet: Fleet) -> None:
    first = await fleet.client()
    await write(first)
    await fleet.stop("b2")
    old = fleet.disks["b2"].copy_to(fleet.path / "old b2")
    kept, old.path = old.path, fleet.disks["b2"].path
    await fleet.start("b2")
    ledgers = [await write(first) for _ in range(10)]
    await first.close()
    await fleet.stop("b2")
    fleet.disks["b2"].path.rename(fleet.path / "new b2")
    kept.rename(old.path)
    new, fleet.disks["b2"] = fleet.disks["b2"], old
    await fleet.start("b2")
    second = await fleet.client()
    assert "older copy" in await refusal(second, "b2")
    for ledger_id in ledgers:
        assert await read(await second.ledgers.open(ledger_id, recover=True)) == payloads()
    # As often as it is started.
    for _ in range(3):
        await fleet.restart("b2")
        assert "older copy" in await refusal(second, "b2")
    await fleet.stop("b2")
    old.path.rename(kept)
    (fleet.path / "new b2").rename(new.path)
    fleet.disks["b2"] = new
    await fleet.start("b2")
    await second.transport.info("b2")


async def test_rule_35_a_copy_of_what_a_stopped_bookie_had_last_is_the_bookie(fleet: Fleet) -> None:
    client = await fleet.client()
    ledger_id = await write(client)
    await fleet.stop("b2")
    fleet.disks["b2"] = fleet.disks["b2"].copy_to(fleet.path / "new disk of b2")
    await fleet.start("b2")
    await client.transport.info("b2")
    assert await read(await client.ledgers.open(ledger_id, recover=True)) == payloads()


async def test_rule_09_a_declared_replacement_is_taken_and_denies_nothing_that_it_may_have_held(
    fleet: Fleet,
) -> None:
    first = await fleet.client()
    ledgers = [await write(first) for _ in range(10)]
    await first.close()
    bookie_id = fleet.bookies["b2"].cookie.bookie_id
    await fleet.empty("b2")
    second = await fleet.client()
    assert bookie_id in await refusal(second, "b2")
    await fleet.stop("b2")
    fleet.disks["b2"] = Disk(fleet.path / "replacement")
    replace_cookie(OsFiles(), DataLayout.at(str(fleet.path / "replacement")), bookie_id, random.Random(9))
    bookie = await fleet.start("b2")
    assert bookie.cookie.repairing
    await second.transport.info("b2")
    assert not fleet.bookies["b2"].cookie.repairing
    for ledger_id in ledgers:
        with pytest.raises(UnknownLedgerState):
            await bookie.read(ledger_id, 0, 0, fence=True)
        assert await add(bookie, entry(ledger_id, COUNT)) == LedgerFenced.code
        assert await read(await second.ledgers.open(ledger_id, recover=True)) == payloads()
    # Ledgers that are made from now on are complete, also after the next start.
    made = await write(second)
    await fleet.restart("b2")
    bookie = fleet.bookies["b2"]
    assert not bookie.ledgers.peek(made).unknown
    assert bookie.ledgers.peek(ledgers[0]).unknown


async def test_rule_09_a_replacement_that_others_registered_is_taken_by_who_knew_its_predecessor(
    fleet: Fleet,
) -> None:
    """Regression: the bookie refused what was expected of it, and a broker expected that for as long as it ran."""
    broker = await fleet.client()
    await broker.transport.info("b2")
    bookie_id = fleet.bookies["b2"].cookie.bookie_id
    await fleet.stop("b2")
    fleet.disks["b2"] = Disk(fleet.path / "replacement")
    replace_cookie(OsFiles(), DataLayout.at(str(fleet.path / "replacement")), bookie_id, random.Random(9))
    await fleet.start("b2")
    await (await fleet.client()).transport.info("b2")  # registers it, as a bookie of a cluster does by itself
    await broker.transport.info("b2")
    await fleet.empty("b2")
    assert "accept-new-disk" in await refusal(broker, "b2")


async def test_rule_35_a_bookie_refuses_another_cluster(fleet: Fleet) -> None:
    client = await fleet.client()
    await client.transport.info("b1")
    fleet.metadata = MemoryMetadataStore()
    await fleet.metadata.create("/instance", random.Random(8).randbytes(8))
    other = await fleet.client()
    text = await refusal(other, "b1")
    assert "correct the list of bookies" in text
    await other.transport.info("b3")  # nobody else has met it
    assert "of cluster" in await refusal(client, "b3")


async def test_rule_35_one_bookie_under_two_names_is_refused(fleet: Fleet) -> None:
    client = await fleet.client()
    await client.transport.info("b1")
    directory = StaticBookies({"other": ("127.0.0.1", fleet.ports["b1"])})
    transport = TcpTransport(directory, client.settings, ConnectionOptions("test"), client.identities)
    with pytest.raises(WrongBookie, match="ledgers know as b1"):
        await transport.info("other")
    await transport.close()


async def test_rule_35_what_is_no_bookie_is_refused(fleet: Fleet) -> None:
    client = await fleet.client()
    async with serving() as service:
        directory = StaticBookies({"b1": service.address})
        transport = TcpTransport(directory, client.settings, ConnectionOptions("test"), client.identities)
        with pytest.raises(WrongBookie, match="no bookie"):
            await transport.info("b1")
        await transport.close()


async def test_rule_35_a_task_without_a_store_believes_only_whom_it_was_given(fleet: Fleet) -> None:
    client = await fleet.client()
    for name in NAMES:
        await client.transport.info(name)
    given = GivenIdentities({name: client.identities.known(name) for name in NAMES})
    transport = TcpTransport(client.directory, client.settings, ConnectionOptions("task"), given)
    for name in NAMES:
        await transport.info(name)
    await fleet.restart("b1")
    await transport.info("b1")
    await fleet.empty("b1")
    with pytest.raises(WrongBookie, match="accept-new-disk"):
        await transport.info("b1")
    await transport.close()


async def test_rule_35_known_bookies_are_reached_without_the_metadata_store(fleet: Fleet) -> None:
    client = await fleet.client()
    ledger_id = await write(client)
    for name in NAMES:
        await client.transport.info(name)

    class Silent(MemoryMetadataStore):
        async def get(self, path: str) -> Versioned | None:
            raise AssertionError(path)

    client.identities._store = TimedStore(Silent(), 1.0)
    reader = client.ledgers.reader(ledger_id, await _metadata(fleet, ledger_id))
    for channel in client.transport._request_channels.values():
        await channel.close()
    client.transport._request_channels.clear()
    reader.update_last_confirmed(0)
    assert len(await reader.read(0, 0)) == 1


async def _metadata(fleet: Fleet, ledger_id: int) -> LedgerMetadata:
    node = await fleet.metadata.get(ledger_path(ledger_id))
    assert node is not None
    return LedgerMetadata.decode(node.value, ledger_id)


async def test_rule_36_a_store_that_knows_fewer_ids_than_a_bookie_holds_is_refused(fleet: Fleet) -> None:
    first = await fleet.client()
    instance = (await fleet.metadata.get("/instance")) or pytest.fail("no instance")
    old = [await registered_cookie(fleet.metadata, name) for name in NAMES]
    assert [one.version for one in old] == [None] * 4
    for _ in range(5):
        await write(first)
    cookies = {name: await fleet.metadata.get(f"/cookies/{name}") for name in NAMES}
    await first.close()
    # The same store from before: its instance, its cookies, and a sequence that begins again.
    restored = MemoryMetadataStore()
    await restored.create("/instance", instance.value)
    for name, node in cookies.items():
        assert node is not None
        await restored.create(f"/cookies/{name}", node.value)
    await StoredLedgers(restored).new_ids(2)
    fleet.metadata = restored
    second = await fleet.client()
    for name in NAMES:
        text = await refusal(second, name)
        assert "were used" in text
        assert "restored from an older copy" in text
    with pytest.raises(MagnetarError):
        await second.ledgers.open(await _new_ledger(second), recover=True)


async def _new_ledger(client: Client) -> int:
    writer = await client.ledgers.create()
    confirmed = Confirmations()
    writer.append(b"never", confirmed)
    await confirmed.count(1)
    assert confirmed.errors
    return writer.ledger_id


async def test_rule_36_the_highest_ledger_id_outlives_its_ledger(fleet: Fleet) -> None:
    client = await fleet.client()
    last = [await write(client) for _ in range(4)][-1]
    bookie = fleet.bookies["b1"]
    for ledger_id in range(last + 1):
        await bookie.delete_ledger(ledger_id)
    await fleet.restart("b1")
    bookie = fleet.bookies["b1"]
    await bookie.collector.collect()
    assert bookie.ledgers.next_ledger_id == last + 1
    assert await StoredLedgers(fleet.metadata).next_id() == last + 1


async def test_rule_36_a_bookie_that_held_nothing_of_it_remembers_how_many_ids_were_used(
    fleet: Fleet,
) -> None:
    """An old store cannot give ids again while the bookies that held them are away."""
    client = await fleet.client()
    await StoredLedgers(fleet.metadata).new_ids(50)
    await client.transport.info("b1")
    await client.close()
    instance, cookie = await fleet.metadata.get("/instance"), await fleet.metadata.get("/cookies/b1")
    assert instance is not None
    assert cookie is not None
    for restart in (False, True):
        fleet.metadata = MemoryMetadataStore()
        await fleet.metadata.create("/instance", instance.value)
        await fleet.metadata.create("/cookies/b1", cookie.value)
        await StoredLedgers(fleet.metadata).new_ids(49)
        if restart:
            await fleet.restart("b1")
        assert "ledger ids below 50 were used" in await refusal(await fleet.client(), "b1")
    await StoredLedgers(fleet.metadata).new_ids(1)
    await (await fleet.client()).transport.info("b1")


async def test_rule_36_clients_that_draw_ids_meanwhile_are_no_reason_to_refuse(fleet: Fleet) -> None:
    one, other = await fleet.client(), await fleet.client()
    await one.transport.info("b1")
    await fleet.restart("b1")
    await one.transport.info("b1")
    other_identities = other.identities
    expected = await other_identities.expected("b1")  # of now
    await StoredLedgers(fleet.metadata).new_ids(5)
    third = await fleet.client()
    await third.transport.info("b1")
    found = fleet.bookies["b1"].introduce(expected)
    assert found.next_ledger_id == 5
    assert await other_identities.verify("b1", expected, found)
