"""The rows that Pulsar has not: ledgers and their copies, repairs, damage, drains, what is wrong.

Members of the cluster have the names that they have at the command line. What may be long comes in pages: `count` rows, and
`next`, which is the `after` of the page behind it; null: there is none.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from ...ownership.ownership import DrainState
from ...service.broker import BrokerService
from ...service.stored import StoredService, stored_ledger
from .routes import Asked, Route

_OWN: Final = "/magnetar/v1"


async def topic_ledgers(asked: Asked, after: int = -1, count: int = 100) -> dict[str, Any]:
    """The ledgers of a topic in its order: messages, sizes, times, fragments with their bookies, or where it is archived."""
    page = await asked.service.ledgers.topic_ledgers(asked, asked.topic, after=after, count=count)
    rows = []
    for row in page.ledgers:
        await asyncio.sleep(0)
        found = msgspec.structs.asdict(row)
        record = found.pop("metadata")
        rows.append({**found, "stored": stored_ledger(row.stored_id, record) if record else None})
    # All of a page may have been trimmed meanwhile.
    return {"ledgers": rows, "next": (page.ledgers[-1].position_id if rows else after) if page.more else None}


def _left(found: DrainState) -> dict[str, Any]:
    anybody = bool(found.brokers or found.bookies)
    return {**msgspec.structs.asdict(found), "can_be_stopped": anybody and found.over}


_B: Final = BrokerService
_DRAINED: Final = {
    "brokers/{name}": {"kind": "broker", "zone": ""},
    "bookies/{name}": {"kind": "bookie", "zone": ""},
    "zones/{zone}": {"kind": "", "name": ""},
}
OWN_ROUTES: Final = (
    Route("GET", f"{_OWN}/problems", _B.diagnose),
    Route("GET", f"{_OWN}/busiest", _B.list_busiest),
    Route("GET", f"{_OWN}/bookies", _B.list_bookies),
    Route("GET", f"{_OWN}/brokers", _B.list_brokers),
    Route("GET", f"{_OWN}/topics/{{domain}}/{{tenant}}/{{namespace}}/{{topic}}/ledgers", topic_ledgers),
    Route("GET", f"{_OWN}/ledgers", StoredService.ledgers),
    Route("GET", f"{_OWN}/ledgers/{{ledger}}", StoredService.ledger),
    Route("GET", f"{_OWN}/repairs", StoredService.repairs),
    Route("GET", f"{_OWN}/damage", StoredService.damage),
    Route("GET", f"{_OWN}/drains", _B.drains, answer=_left, given={"name": "", "zone": "", "kind": ""}),
    *(
        Route(method, f"{_OWN}/{whose}/drain", operation, answer=answer, given={**given, **more})
        for whose, given in _DRAINED.items()
        for method, operation, answer, more in (
            ("GET", _B.drains, _left, {}), ("POST", _B.drain, _left, {"undo": False}),
            ("DELETE", _B.drain, None, {"undo": True}),
        )
    ),
)  # fmt: skip
