"""What a cluster says of itself in its metadata: its bookies, its brokers, what waits for repair, and what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from magnetar.metadata.paths import (
    AUDITOR_PATH,
    COOKIES_PATH,
    DRAINING_BOOKIES_PATH,
    INSTANCE_PATH,
    KNOWN_BROKERS_PATH,
)
from magnetar.proto.errors import DataDirectoryError, MagnetarError
from magnetar.runtime.quantities import counted
from magnetar.runtime.tasks import LongTask

if TYPE_CHECKING:
    from magnetar.metadata import MetadataStore


_TIMEOUT_S = 10.0
_POLL_S = 1.0  # between two looks of a daemon at its cluster
# At least, times the square of its members: each reads all, and together they make 3,000 reads a second at most.
_PAUSE_S = 0.001
_MOST_PAGES = 10  # of the queue of repairs, with 1,000 ledgers each at most, that a daemon counts
_MOST_DAMAGED = 1000  # ledgers of a bookie that a daemon counts
_MOST_NOTES = 5


async def cluster_facts(store: MetadataStore, *, count: bool = True) -> dict[str, Any]:
    """What `status --json` prints; without `count` no figures that cost more than a read for each daemon.

    `problems`: what is wrong, by who or what it is about; empty if all is well.
    """
    from magnetar.broker.ownership.records import BALANCER_PATH
    from magnetar.metadata.ledgers import StoredLedgers

    instance, balancer = await store.get(INSTANCE_PATH), await store.get(BALANCER_PATH)
    auditor = await store.get(AUDITOR_PATH)
    found = {
        "cluster": "" if instance is None else instance.value.hex(),
        "brokers": await broker_facts(store),
        "balancer": "" if balancer is None else balancer.value.decode("utf-8", "replace"),
        "bookies": await bookie_facts(store, count=count),
        "ledgers": sum([len(page) async for page in StoredLedgers(store).pages()]) if count else 0,
        "under_replicated_ledgers": await ledgers_to_repair(store, 0 if count else _MOST_PAGES),
        "auditor": "" if auditor is None else auditor.value.decode("utf-8", "replace"),
    }
    found["problems"] = await _problems(store, found)
    return found


async def _problems(store: MetadataStore, found: dict[str, Any]) -> dict[str, str]:
    problems = {}
    for bookie in found["bookies"]:
        if bookie["state"] == "lost":
            problems[f"bookie {bookie['id']}"] = "it is lost: it has no session with the metadata store"
        elif bookie["reason"]:
            problems[f"bookie {bookie['id']}"] = bookie["reason"]
        for subject, reason in bookie["problems"].items():
            problems[f"bookie {bookie['id']}, {subject}"] = reason
        if damaged := bookie["damaged_ledgers"]:
            more = " or more" if damaged == _MOST_DAMAGED else ""
            problems[f"damage at bookie {bookie['id']}"] = (
                f"copies of {counted(damaged, 'ledger')}{more} are damaged there"
            )
    for broker in found["brokers"]:
        if broker["state"] == "lost":
            problems[f"broker {broker['name']}"] = (
                "it is lost: it did not stop, and has no session with the metadata store"
            )
        for subject, reason in broker["problems"].items():
            problems[f"broker {broker['name']}, {subject}"] = reason
    if not found["auditor"]:
        problems["auditor"] = (
            "no process audits the ledgers: what a lost bookie had is not copied (repair.auditor)"
        )
    if waiting := found["under_replicated_ledgers"]:
        note = await _note(store)
        problems["repair"] = f"{counted(waiting, 'ledger waits', 'ledgers wait')} for repair" + (
            f"; {note}" if note else ""
        )
    return problems


async def _note(store: MetadataStore) -> str:
    """Why a ledger stays in the queue, if one of the first few says so."""
    from magnetar.ledger.replication.queue import UnderreplicatedLedgers
    from magnetar.metadata.timed import TimedStore
    from magnetar.proto.errors import InvalidArgument

    queue = UnderreplicatedLedgers(TimedStore(store, _TIMEOUT_S))
    for page in (await queue.pages())[:1]:
        for ledger_id in (await queue.ledgers(page))[:_MOST_NOTES]:
            with contextlib.suppress(InvalidArgument):  # a record that cannot be read says nothing
                if (request := await queue.get(ledger_id)) is not None and request[0].note:
                    return f"ledger {ledger_id}: {request[0].note}"
    return ""


class ClusterHealth:
    """What is wrong with the cluster of a daemon, as its metadata say: `problems` is read anew every few seconds."""

    def __init__(self, store: MetadataStore) -> None:
        from magnetar.broker.ownership.records import BROKERS_PATH
        from magnetar.ledger.directory import BOOKIES_PATH

        self.problems: dict[str, str] = {}
        self.looks = 0
        self._store = store
        self._changed = asyncio.Event()
        self._watches = [
            store.watch(path, lambda _: self._changed.set()) for path in (BOOKIES_PATH, BROKERS_PATH)
        ]
        self._task = LongTask("the look at the health of the cluster", self._follow)

    async def close(self) -> None:
        """Looks no more."""
        for watch in self._watches:
            watch.close()
        await self._task.close()

    async def _follow(self) -> None:
        members = 0
        while True:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    found = await cluster_facts(self._store, count=False)
                self.problems = found["problems"]
                members = len(found["bookies"]) + len(found["brokers"])
            except (MagnetarError, TimeoutError) as error:
                reason = str(error) or f"no answer within {_TIMEOUT_S:g} s"
                self.problems = {"metadata": f"the metadata store cannot be read: {reason}"}
            self.looks += 1
            pause_s = members**2 * _PAUSE_S
            await asyncio.sleep(pause_s)
            with contextlib.suppress(TimeoutError):  # who registers or vanishes is seen at once
                async with asyncio.timeout(max(_POLL_S - pause_s, 0)):
                    await self._changed.wait()
            self._changed.clear()


async def broker_facts(store: MetadataStore) -> list[dict[str, Any]]:
    """The brokers, by name. `state`: ready, draining, drained, stopping, or lost: not registered now, without a stop."""
    import msgspec

    from magnetar.broker.ownership.cluster_view import cluster_brokers
    from magnetar.broker.ownership.ownership import BrokerRow
    from magnetar.broker.ownership.records import BrokerLoad

    known = await store.children(KNOWN_BROKERS_PATH)
    brokers = {name: BrokerRow(name, "", "", "", "lost", 0, "", BrokerLoad()) for name in known}
    brokers |= await cluster_brokers(store)
    return [msgspec.to_builtins(brokers[name]) for name in sorted(brokers)]


async def bookie_facts(store: MetadataStore, *, count: bool = True) -> list[dict[str, Any]]:
    """All that ever registered, by id. `state`: writable, read-only, stalled, draining, or lost: not registered now.

    "unreadable": its registration is damaged. `reason`: why it takes no new entries. `count`: as in `cluster_facts`.
    """
    from magnetar.ledger.directory import BOOKIES_PATH, BookieFacts, decode_registration
    from magnetar.metadata.damage import DAMAGED_PATH

    draining = await store.children(DRAINING_BOOKIES_PATH)
    bookies = []
    for name in sorted({*await store.children(COOKIES_PATH), *await store.children(BOOKIES_PATH)}):
        node = await store.get(f"{BOOKIES_PATH}/{name}")
        fields: dict[str, Any] = {}
        missing, reason = "lost", ""
        try:
            fields = {} if node is None else decode_registration(node.value, name)
        except DataDirectoryError as error:
            missing, reason = "unreadable", error.message
        facts = BookieFacts.of(fields)
        state = "read-only" if facts.read_only else "stalled" if facts.journal_stalled_s else "writable"
        state = "draining" if name in draining else state
        bookies.append(
            {
                "id": name,
                "address": fields.get("address", ""),
                "state": state if fields else missing,
                "reason": reason or facts.refusal,
                "problems": fields.get("problems", {}),
                "rack": facts.labels.rack,
                "zone": facts.labels.zone,
                "group": facts.labels.group,
                "free_bytes": facts.free_bytes,
                "incarnation": fields.get("incarnation", 0),  # another one at each start
                "damaged_ledgers": len(
                    # Behind a name, so that a store need not list all of them at each look.
                    await store.children(
                        f"{DAMAGED_PATH}/{name}", after="/", limit=0 if count else _MOST_DAMAGED
                    )
                ),
            }
        )
    return bookies


async def ledgers_to_repair(store: MetadataStore, most_pages: int = 0) -> int:
    """How many wait in the queue; of its first `most_pages` pages (0: of all)."""
    from magnetar.ledger.replication.queue import UnderreplicatedLedgers
    from magnetar.metadata.timed import TimedStore

    return await UnderreplicatedLedgers(TimedStore(store, _TIMEOUT_S)).count(most_pages)
