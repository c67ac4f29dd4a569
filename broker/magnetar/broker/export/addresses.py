"""What clients that go to the bookies are told of them."""

from __future__ import annotations

from typing import Any

from magnetar.ledger import LedgerMetadata
from magnetar.proto.errors import BookieUnavailable, MagnetarError
from magnetar.runtime.connection.addresses import format_address

from ..stores import Bookies


def name_bookies(found: dict[str, str], bookies: Bookies | None, ledger_id: int, metadata: bytes) -> None:
    """Adds to `found` ({id: "host:port"}) the bookies that ledger metadata names; those that nobody knows are left out."""
    if bookies is None:
        return
    try:
        ensembles = LedgerMetadata.decode(metadata, ledger_id).ensembles
    except MagnetarError:  # damaged: whoever reads the ledger is told
        return
    for ensemble in ensembles:
        for bookie in ensemble.bookies:
            if bookie not in found:
                try:
                    found[bookie] = format_address(bookies.address(bookie))
                except BookieUnavailable:
                    continue


def writable_bookies(bookies: Bookies | None) -> list[list[Any]]:
    """Rows [id, "host:port", rack, zone] of those that take new entries."""
    rows: list[list[Any]] = []
    if bookies is None:
        return rows
    for bookie in bookies.writable():
        try:
            address = format_address(bookies.address(bookie))
        except BookieUnavailable:
            continue
        rows.append([bookie, address, *bookies.labels(bookie)])
    return rows
