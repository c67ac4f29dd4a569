"""Which consumer has the first chunks of a message that is sent in chunks, and so gets the rest: nobody else can use them.

    first chunk delivered --> owned, by whoever got it --last chunk delivered--> whole there: it is pending, as any message
    owned, and the owner leaves --> nobody's: its chunks come again, and whoever gets the first of them owns it
    whole there, and given back --> with its first chunk: owned anew, by anybody; without it: the rest goes there again

A chunk does not overtake those of its message that are to be delivered again (`Unfinished.behind`): it joins them in the
replay queue, which is in the order of the topic. An entry is looked into only if its flags say that it has chunks. Of more
than MAX_UNFINISHED messages, whose producers are gone as a rule, the oldest are forgotten: their next chunk, if there ever
is one, goes to anybody, who gives it back. So are the oldest of as many whole ones.
"""

from __future__ import annotations

from typing import TypeVar

from magnetar.proto.batch_extensions import Chunk, MessageKey, entry_chunks
from magnetar.proto.entry import Entry

from ....cursors.core.acks import EntryKey, Position
from ..consumer import Consumer

T = TypeVar("T")

MAX_UNFINISHED = 1_000

Chunks = dict[int, tuple[MessageKey, Chunk]]  # see `entry_chunks`


class Unfinished:
    """A message of which chunks were delivered, and not the last one."""

    __slots__ = ("behind", "last", "owner")

    def __init__(self) -> None:
        self.owner: Consumer | None = None
        self.last: Position = (0, 0, 0)  # of those that were delivered
        self.behind: Position | None = None  # chunks up to here may be in the replay queue


class ChunkOwners:
    """See the module docstring."""

    def __init__(self) -> None:
        self.unfinished: dict[MessageKey, Unfinished] = {}
        self._whole: dict[MessageKey, Consumer] = {}  # who has all chunks, and may give back some
        self._looked_into: tuple[EntryKey | None, Chunks] = (None, {})

    def chunks_of(self, key: EntryKey, entry: Entry) -> Chunks:
        """Those of an entry, which is looked at several times in a row."""
        known, found = self._looked_into
        if key != known:
            found = entry_chunks(entry)
            self._looked_into = key, found
        return found

    def delivered(
        self, message: MessageKey, consumer: Consumer, position: Position, *, last: bool, again: bool
    ) -> None:
        """A chunk goes to this consumer. Unless it comes `again`, as after a seek, the others come behind it."""
        unfinished = self.unfinished.pop(message, None)
        if last:
            put_newest(self._whole, message, consumer)
            return
        if unfinished is None:
            if again and self._whole.get(message) is consumer:
                return
            self._whole.pop(message, None)
            unfinished = Unfinished()
        put_newest(self.unfinished, message, unfinished)
        unfinished.owner = consumer
        unfinished.last = max(unfinished.last, position)
        if unfinished.behind is not None and position >= unfinished.behind:
            unfinished.behind = None

    def whole_at(self, message: MessageKey, chunk: Chunk) -> Consumer | None:
        """Of a chunk that was given back: who has the others, and waits for it; None: they come again, too."""
        return self._whole.get(message) if chunk.index else None

    def left(self, consumer: Consumer) -> None:
        """What it had comes again, before what is new."""
        self._whole = {message: owner for message, owner in self._whole.items() if owner is not consumer}
        for unfinished in self.unfinished.values():
            if unfinished.owner is consumer:
                unfinished.owner = None
                unfinished.behind = max(unfinished.behind or unfinished.last, unfinished.last)


def put_newest(known: dict[MessageKey, T], message: MessageKey, value: T) -> None:
    """As the newest; of too many the oldest is forgotten."""
    known.pop(message, None)
    if len(known) >= MAX_UNFINISHED:
        del known[next(iter(known))]
    known[message] = value
