"""What staged ledgers hold: their entries, read and checked, and joined to one entry if they are few.

An entry is what a producer could have sent (`proto.admission`), and follows the one before it. Batches of messages are
joined untouched; work is per entry and per batch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from xxhash import xxh3_128_digest

from magnetar.proto.admission import check_entry
from magnetar.proto.batch_extensions import entry_flags
from magnetar.proto.entry import ENTRY_DELAYED, ENTRY_PUBLISHED, Entry, encode_entry, entry_content
from magnetar.proto.errors import ChecksumMismatch, InvalidArgument, MalformedFrame
from magnetar.proto.ids import MAX_BATCHES_PER_ENTRY, MAX_MESSAGES_PER_BATCH
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES

from ..log.records import LedgerInfo
from ..resources.stores import Ledgers
from ..topics.coalescer import MAX_NAME_BYTES

READ_BYTES = 1 << 20


def digest_of(entry: bytes) -> bytes:
    """By which an entry is known again, wherever and whenever it was appended."""
    return xxh3_128_digest(entry_content(entry))


@dataclass(slots=True)
class StagedBatches:
    """What the staged ledgers of a small batch hold, in task order: parallel lists."""

    batches: list[bytes] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    producers: list[int] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """The batches of an entry, which was checked."""
        numbers = [self.names.setdefault(name, len(self.names)) for name in entry.producer_names]
        self.batches += [bytes(entry.batch(position)) for position in range(entry.batch_count)]
        self.counts += [end - start for start, end in pairwise((0, *entry.end_indexes))]
        self.producers += [numbers[number] for number in entry.producers]

    def fits(self) -> bool:
        """True if one entry can hold it all, however large."""
        return (
            0 < len(self.batches) <= MAX_BATCHES_PER_ENTRY
            and sum(self.counts) <= MAX_MESSAGES_PER_BATCH
            and sum(4 * len(name) + 5 for name in self.names) <= MAX_NAME_BYTES
        )

    def encode(self, first_index: int, append_time_ms: int) -> bytes:
        """The entry."""
        return encode_entry(
            self.batches,
            self.counts,
            self.producers,
            list(self.names),
            first_index=first_index,
            append_time_ms=append_time_ms,
            flags=entry_flags(self.batches) | ENTRY_PUBLISHED,
        )


async def read_staged(ledgers: Ledgers, infos: Sequence[LedgerInfo], max_batch_bytes: int) -> StagedBatches:
    """Reads closed staged ledgers. Raises as `staged_entries`."""
    found = StagedBatches()
    for info in infos:
        async for entry in staged_entries(ledgers, info, max_batch_bytes):
            found.add(entry)
    return found


async def staged_entries(
    ledgers: Ledgers, info: LedgerInfo, max_batch_bytes: int, stride: int = 1
) -> AsyncIterator[Entry]:
    """The entries of a closed staged ledger, all or one in `stride` and the last one, in order, checked.

    Raises InvalidArgument for one that a broker would not have made, or that does not follow the one before.
    """
    reader = await ledgers.open(info.stored_id, recover=False)
    at = messages = 0
    while at < info.entries:
        for data in await reader.read(at, at if stride > 1 else info.entries - 1, max_bytes=READ_BYTES):
            try:
                entry = Entry(data, LEDGER_ENTRY_HEADER_BYTES)
                if entry.first_index != messages and (stride == 1 or at == 0):
                    raise MalformedFrame(f"it begins at message {entry.first_index}, not {messages}")
                check_entry(entry, max_batch_bytes)
                if entry.flags & ENTRY_DELAYED:
                    raise InvalidArgument("only what producers send can have a delivery time")
            except (MalformedFrame, ChecksumMismatch, InvalidArgument) as error:
                raise InvalidArgument(
                    f"entry {at} of staged ledger {info.stored_id} is not one of a topic: {error}"
                ) from error
            yield entry
            messages += entry.message_count
            at = min(at + stride, info.entries - 1) if at < info.entries - 1 else info.entries
