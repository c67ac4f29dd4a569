"""Which messages of each batch are not acknowledged, as a client keeps it, and the ids that say so in ACK.

with ack sets       any message at once, by the bits of those that are left
without             a batch once all of its messages are acknowledged, those that an ack set hid among them: so never then;
                    up to a message within one: the entry before it, whose id the client computes
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.ids import encode_ack_set, unsigned


class Id(NamedTuple):
    """Of a message: of the entry, and its place in the batch; -1, 0: it is in none."""

    ledger: int
    entry: int
    batch_index: int = -1
    batch_size: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Of its entry."""
        return self[:2]

    def data(self, left: int | None = None) -> wire.MessageIdData:
        """As a command has it; `left`: bits of the messages that are not acknowledged."""
        found = wire.MessageIdData(ledger_id=unsigned(self.ledger), entry_id=unsigned(self.entry))
        if left:
            gone = [(n, n) for n in range(self.batch_size) if not left >> n & 1]
            found.ack_set.extend(encode_ack_set(gone, self.batch_size))
        return found


class Unacked(dict[tuple[int, int], int]):
    """By entry: the bits of its messages that are not acknowledged. `ack_sets`: acknowledged by them."""

    def __init__(self, *, ack_sets: bool) -> None:
        super().__init__()
        self.ack_sets = ack_sets

    def acknowledge(self, ids: Iterable[Id]) -> tuple[list[wire.MessageIdData], list[Id]]:
        """What ACK is to name for these, and which of them it acknowledges."""
        ids = list(ids)
        by_entry: dict[tuple[int, int], Id] = {}
        for one in ids:
            by_entry[one.key] = one
            if one.batch_size:
                self[one.key] = self.get(one.key, (1 << one.batch_size) - 1) & ~(1 << one.batch_index)
        named = [
            (one, self.get(key, 0) if one.batch_size else 0)
            for key, one in by_entry.items()
            if self.ack_sets or not one.batch_size or not self[key]
        ]
        covered = {one.key for one, _ in named}
        return [one.data(left) for one, left in named], [one for one in ids if one.key in covered]

    def acknowledge_up_to(self, one: Id) -> tuple[wire.MessageIdData, bool]:
        """What a cumulative ACK is to name, and whether it acknowledges the message itself."""
        if not one.batch_size:
            return one.data(), True
        through = (1 << one.batch_index + 1) - 1
        self[one.key] = left = self.get(one.key, (1 << one.batch_size) - 1) & ~through
        if not left >> one.batch_index + 1:
            return one.data(), True
        if self.ack_sets:
            behind = ((1 << one.batch_size) - 1) & ~through
            return one.data(behind), True
        return Id(one.ledger, one.entry - 1).data(), False
