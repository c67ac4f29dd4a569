"""What a cluster says of itself in its metadata: its bookies, its brokers, and what waits for repair."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from magnetar.proto.errors import DataDirectoryError

if TYPE_CHECKING:
    from magnetar.metadata import MetadataStore

__all__ = ["bookie_facts", "broker_facts", "cluster_facts", "ledgers_to_repair"]

_log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


async def cluster_facts(store: MetadataStore) -> dict[str, Any]:
    """What `status --json` prints."""
    from magnetar.broker.ownership.records import BALANCER_PATH
    from magnetar.ledger.replication.auditor import AUDITOR_PATH
    from magnetar.metadata.ledgers import StoredLedgers
    from magnetar.metadata.paths import INSTANCE_PATH

    instance, balancer = await store.get(INSTANCE_PATH), await store.get(BALANCER_PATH)
    auditor = await store.get(AUDITOR_PATH)
    return {
        "cluster": "" if instance is None else instance.value.hex(),
        "brokers": await broker_facts(store),
        "balancer": "" if balancer is None else balancer.value.decode("utf-8", "replace"),
        "bookies": await bookie_facts(store),
        "ledgers": sum([len(page) async for page in StoredLedgers(store).pages()]),
        "under_replicated_ledgers": await ledgers_to_repair(store),
        "auditor": "" if auditor is None else auditor.value.decode("utf-8", "replace"),
    }


async def broker_facts(store: MetadataStore) -> list[dict[str, Any]]:
    """The brokers that are registered, by name. `state`: ready, draining, drained or stopping."""
    import msgspec

    from magnetar.broker.ownership.cluster_view import cluster_brokers

    brokers = await cluster_brokers(store)
    return [msgspec.to_builtins(brokers[name]) for name in sorted(brokers)]


async def bookie_facts(store: MetadataStore) -> list[dict[str, Any]]:
    """All that ever registered, by id. `state`: writable, read-only, stalled, draining, or lost: not registered now.

    "unreadable": its registration is damaged, as a warning says.
    """
    from magnetar.ledger.directory import BOOKIES_PATH, BookieFacts, decode_registration
    from magnetar.ledger.replication.cluster_watch import DRAINING_PATH
    from magnetar.metadata.damage import DAMAGED_PATH
    from magnetar.metadata.paths import COOKIES_PATH

    draining = await store.children(DRAINING_PATH)
    bookies = []
    for name in sorted({*await store.children(COOKIES_PATH), *await store.children(BOOKIES_PATH)}):
        node = await store.get(f"{BOOKIES_PATH}/{name}")
        fields: dict[str, Any] = {}
        missing = "lost"
        try:
            fields = {} if node is None else decode_registration(node.value, name)
        except DataDirectoryError as error:
            _log.warning("%s", error)
            missing = "unreadable"
        facts = BookieFacts.of(fields)
        state = "read-only" if facts.read_only else "stalled" if facts.journal_stalled_s else "writable"
        state = "draining" if name in draining else state
        bookies.append(
            {
                "id": name,
                "address": fields.get("address", ""),
                "state": state if fields else missing,
                "rack": facts.labels.rack,
                "zone": facts.labels.zone,
                "group": facts.labels.group,
                "free_bytes": facts.free_bytes,
                "incarnation": fields.get("incarnation", 0),  # another one at each start
                "damaged_ledgers": len(await store.children(f"{DAMAGED_PATH}/{name}")),
            }
        )
    return bookies


async def ledgers_to_repair(store: MetadataStore) -> int:
    """How many wait in the queue."""
    from magnetar.ledger.replication.queue import RepairQueue

    queue = RepairQueue(store, _TIMEOUT_S)
    return sum([len(await queue.ledgers(page)) for page in await queue.pages()])
