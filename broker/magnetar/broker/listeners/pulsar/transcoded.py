"""Batches as Pulsar's consumers get them: a native one is transcoded once for all of them, and kept while there is room."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence

from magnetar.proto.batch import FORMAT_PULSAR, decode_batch_header
from magnetar.proto.entry import Entry
from magnetar.proto.errors import MagnetarError
from magnetar.proto.frames import DEFAULT_MAX_MESSAGE_BYTES
from magnetar.proto.pulsar.transcoding import Slice, to_pulsar

from ...cursors.core.acks import EntryKey
from .borders import borders_of

MAX_TRANSCODED_BYTES = 32 * 1024 * 1024
_OBJECT_BYTES = 400  # around a batch that is kept


class Transcoded:
    """See the module docstring."""

    __slots__ = ("_limit", "_slices", "max_message_bytes", "used")

    def __init__(
        self, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, limit: int = MAX_TRANSCODED_BYTES
    ) -> None:
        """`max_message_bytes`: what clients take, always the same. `limit`: bytes that are kept."""
        self._limit = limit
        self.max_message_bytes = max_message_bytes
        self._slices: OrderedDict[tuple[EntryKey, int, bytes], Sequence[Slice]] = OrderedDict()
        self.used = 0

    def slices(self, key: EntryKey, entry: Entry, position: int) -> Sequence[Slice]:
        """Of the batch at `position` of an entry; none if a compaction left nothing of it. Raises as `to_pulsar`."""
        batch = entry.batch(position)
        # A compaction leaves other bytes of a batch at the same place: its checksum tells them apart.
        name = (key, entry.batch_start_index(position), bytes(batch[4:12]))
        found = self._slices.get(name)
        if found is not None:
            self._slices.move_to_end(name)
            return found
        if not batch:
            return ()
        header = decode_batch_header(batch)
        if header.format == FORMAT_PULSAR:
            return (Slice(0, header.message_count, batch[header.header_length :]),)
        producer = entry.producer_names[entry.producers[position]]
        found = self._slices[name] = to_pulsar(batch, producer, self.max_message_bytes)
        self.used += _size(found)
        while self.used > self._limit:
            self.used -= _size(self._slices.popitem(last=False)[1])
        return found

    def borders(self, key: EntryKey, entry: Entry) -> Sequence[int]:
        """Where the batches of an entry end as Pulsar's consumers see them, those that go out in slices among them."""
        cuts: list[int] = []
        borders = borders_of(entry)
        for position in range(entry.batch_count) if borders else ():
            index = entry.batch_start_index(position)
            with contextlib.suppress(MagnetarError):  # what cannot be transcoded is not delivered either
                cuts += [index + one.first for one in self.slices(key, entry, position)[1:]]
        return sorted({*borders, *cuts}) if cuts else borders


def _size(slices: Sequence[Slice]) -> int:
    return _OBJECT_BYTES + sum([len(one.data) for one in slices])
