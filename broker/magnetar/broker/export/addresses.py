"""What clients that go to the bookies learn of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from magnetar.proto.errors import BookieUnavailable
from magnetar.runtime.connection.addresses import format_address

from ..resources.stores import Bookies


class _Ensembles(msgspec.Struct):
    """Of ledger metadata only what is needed here: 2 us instead of 50 for all of it, and lists have thousands."""

    ensembles: list[tuple[int, list[str]]]


_decode = msgspec.msgpack.Decoder(_Ensembles).decode


def name_bookies(found: dict[str, str], bookies: Bookies | None, metadata: bytes) -> None:
    """Adds to `found` ({id: "host:port"}) the bookies that ledger metadata names; those that nobody knows are left out."""
    if bookies is None:
        return
    try:
        ensembles = _decode(metadata).ensembles
    except msgspec.MsgspecError:  # damaged: whoever reads the ledger gets the error
        return
    for _, names in ensembles:
        for bookie in names:
            if bookie not in found:
                try:
                    found[bookie] = format_address(bookies.address(bookie))
                except BookieUnavailable:
                    continue


def identities_of(names: Iterable[str], bookies: Bookies | None) -> dict[str, list[Any]]:
    """{id: [cluster, bookie id, instance, start, incarnation]} of those that this process has verified (rule 35)."""
    found: dict[str, list[Any]] = {}
    if bookies is not None:
        for bookie in names:
            identity = bookies.identity(bookie)
            if identity.instance:
                found[bookie] = [
                    identity.cluster, identity.bookie_id, identity.instance, identity.start, identity.incarnation
                ]  # fmt: skip
    return found


def writable_bookies(bookies: Bookies | None) -> list[list[Any]]:
    """Rows [id, "host:port", rack, zone, group] of those that take new entries."""
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
