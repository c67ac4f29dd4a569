"""How many copies of each entry the bookies of a cluster have, asked of them one by one, beside what metadata says."""

from __future__ import annotations

from typing import NamedTuple

from magnetar.ledger import LedgerMetadata, LedgerSettings, StaticBookies, TcpTransport
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.connection import ConnectionOptions
from support.cluster.processes import ClusterProcesses
from support.zookeeper import opened


class Replicas(NamedTuple):
    """Over all closed ledgers."""

    ledgers: int
    entries: int
    missing: int  # copies that a write set should have and has not
    open_ledgers: int


async def count_replicas(cluster: ClusterProcesses) -> Replicas:
    """Every entry of every closed ledger, at every bookie of its write set."""
    bookies = {daemon.name: ("127.0.0.1", daemon.process.ports["bookie"]) for daemon in cluster.bookies}
    transport = TcpTransport(StaticBookies(bookies), LedgerSettings(), ConnectionOptions("replicas"))
    total = Replicas(0, 0, 0, 0)
    try:
        async with opened(cluster.url) as store:
            ledgers = StoredLedgers(store)
            async for page in ledgers.pages():
                for ledger_id in page:
                    node = await ledgers.get(ledger_id)
                    if node is not None:
                        metadata = LedgerMetadata.decode(node.value, ledger_id)
                        found = await _of_ledger(transport, ledger_id, metadata)
                        total = Replicas(*(sum(pair) for pair in zip(total, found)))
    finally:
        await transport.close()
    return total


async def _of_ledger(transport: TcpTransport, ledger_id: int, metadata: LedgerMetadata) -> Replicas:
    if not metadata.closed:
        return Replicas(0, 0, 0, 1)
    names = dict.fromkeys(name for ensemble in metadata.ensembles for name in ensemble.bookies)
    stored = {name: await _stored(transport, name, ledger_id, metadata.last_entry) for name in names}
    missing = 0
    for entry_id in range(metadata.last_entry + 1):
        bookies = metadata.ensemble_of(entry_id).bookies
        write_set = metadata.striping.write_set(entry_id)
        missing += sum(not stored[bookies[position]][entry_id] for position in write_set)
    return Replicas(1, metadata.last_entry + 1, missing, 0)


async def _stored(transport: TcpTransport, bookie: str, ledger_id: int, last_entry: int) -> bytearray:
    """A byte for each entry: whether this bookie has it. A bookie that does not know, or does not answer, has nothing."""
    has = bytearray(last_entry + 1)
    following = 0
    while 0 <= following <= last_entry:
        try:
            page = await transport.list_entries(bookie, ledger_id, first=following)
        except MagnetarError:
            break
        for first, last in page.ranges:
            last = min(last, last_entry)
            has[first : last + 1] = b"\x01" * (last + 1 - first)
        following = page.following
    return has
