"""Which groups of a topic's producers are stored already, by producer name and sequence id; without I/O.

    last      of a name: its highest sequence id that is durable. It outlives connections, brokers and ledgers
    pushed    of a session: the highest one that was taken, durable or on its way. A session begins with `last`, for
              nothing of an older one is outstanding then (rule 33): what failed on its way is not in `pushed` any more

A group has a first and a last sequence id. Ids may run ahead, and who knows only one of the two gives it twice:

    pushed < first            it is stored, and pushed = last
    last <= pushed            a duplicate: it is not stored. Its receipt comes behind all that is outstanding now, so it is
                              not acknowledged before its original is durable (rule 27)
    first <= pushed < last    SequenceIdError: a part of it is stored, and a group is stored as a whole

The chunks of a message share one sequence id. It counts as stored with the last chunk; until then it is known which chunk is
the next one:

    id <= pushed                       a duplicate
    the same chunk id, number < next   a duplicate
    the same chunk id, number = next   it is stored
    another chunk id, number 0         it is stored, and the message begins anew
    else                               SequenceIdError: a chunk is missing

For example, with pushed 7: 6-7 is a duplicate, 7-8 an error, 8-9 is stored, and a chunk of 10 after that leaves pushed at 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import nsmallest
from typing import NamedTuple

import msgspec

from magnetar.proto.batch_extensions import Chunk
from magnetar.proto.errors import DataDirectoryError, SequenceIdError

_ROWS_PER_PIECE = 1_000
_SPARE = 16  # a share of the most producers is forgotten at once, so that looking for the oldest costs little for each


def is_duplicate(pushed: int, first: int, last: int) -> bool:
    """See the module docstring. Raises SequenceIdError."""
    if first > pushed:
        return False
    if last <= pushed:
        return True
    raise SequenceIdError(
        f"messages up to sequence id {pushed} are stored, and a group of {first} to {last} is stored as a whole: send those "
        f"from {pushed + 1} on in a group of their own"
    )


class Partial(NamedTuple):
    """A message of which some chunks came."""

    sequence_id: int
    chunk_id: bytes
    following: int  # number of the next chunk


def _following(partial: Partial | None, sequence_id: int, chunk: Chunk) -> int:
    """Which chunk of the message that `chunk` belongs to is the next one."""
    if partial is None or partial[:2] != (sequence_id, chunk.chunk_id):
        return 0
    return partial.following


class Pushed:
    """Of one session."""

    __slots__ = ("last", "partial")

    def __init__(self, last: int, partial: Partial | None) -> None:
        self.last = last  # -1: none
        self.partial = partial

    def take(self, first: int, last: int, chunk: Chunk | None) -> bool:
        """True if the group is to be stored, False for a duplicate. Raises SequenceIdError, and has taken nothing then."""
        if is_duplicate(self.last, first, last):
            return False
        if chunk is not None:
            following = _following(self.partial, last, chunk)
            if chunk.index < following:
                return False
            if chunk.index > following:
                raise SequenceIdError(
                    f"chunk {chunk.index} of the message with sequence id {last} comes when chunk {following} is the next "
                    "one; send the message from its first chunk on"
                )
            self.partial = Partial(last, chunk.chunk_id, following + 1)
            if not chunk.last:
                return True
        self.last = last
        return True


class _Known:
    """What is durable of one name."""

    __slots__ = ("last", "partial", "used_ms")

    def __init__(self, last: int, used_ms: int, partial: Partial | None) -> None:
        self.last = last
        self.used_ms = used_ms  # when something of it was appended last
        self.partial = partial

    def stored(self, last: int, chunk: Chunk | None) -> None:
        """A group is there, whatever its ids: those of a time without deduplication may have begun anew."""
        if last > self.last:
            if chunk is None or chunk.last:
                self.last, self.partial = last, None
            elif chunk.index >= _following(self.partial, last, chunk):
                self.partial = Partial(last, chunk.chunk_id, chunk.index + 1)


_decode_rows = msgspec.msgpack.Decoder(list[tuple[str, int, int, Partial | None]]).decode
_encode = msgspec.msgpack.Encoder().encode


class KnownProducers:
    """What is durable, by producer name. Names that nobody uses are forgotten, by age and number; never connected ones."""

    def __init__(self, ttl_ms: int, max_producers: int, connected: Callable[[str], bool]) -> None:
        self._ttl_ms = ttl_ms
        self._max_producers = max_producers
        self._connected = connected
        self._full_at = max_producers  # names; more where most of them are connected
        self._known: dict[str, _Known] = {}
        self._changed: dict[str, None] = {}

    def begin(self, name: str, unconfirmed: Iterable[tuple[int, Chunk | None]] = ()) -> Pushed:
        """Of a new session of that name, of which these groups are on their way."""
        known = self._known.get(name)
        found = _Known(-1, 0, None) if known is None else _Known(known.last, 0, known.partial)
        for last, chunk in unconfirmed:
            found.stored(last, chunk)
        return Pushed(found.last, found.partial)

    def stored(self, name: str, last: int, chunk: Chunk | None, appended_ms: int) -> None:
        """A group is durable, or was found in the log; groups of a name come in order. Again, it changes nothing."""
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= self._full_at:
                self._forget_oldest()
            known = self._known[name] = _Known(-1, appended_ms, None)
        if appended_ms > known.used_ms:
            known.used_ms = appended_ms
        known.stored(last, chunk)
        self._changed[name] = None

    def forget(self, now_ms: int) -> None:
        """Those that nobody has used for the time to live."""
        before_ms = now_ms - self._ttl_ms
        for name in [name for name, known in self._known.items() if known.used_ms < before_ms]:
            if not self._connected(name):
                del self._known[name]

    def _forget_oldest(self) -> None:
        spare = max(self._max_producers // _SPARE, 1)
        unused = [(known.used_ms, name) for name, known in self._known.items() if not self._connected(name)]
        for _, name in nsmallest(max(len(self._known) - self._max_producers, 0) + spare, unused):
            del self._known[name]
        self._full_at = max(self._max_producers, len(self._known) + spare)

    # --- stored form -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Nothing is known."""
        self._known.clear()
        self._changed.clear()

    def pieces(self) -> Iterator[bytes]:
        """All of it: rows of [name, last, used ms, partial or nil]."""
        return self._encoded(list(self._known))

    def changes(self) -> Iterator[bytes]:
        """The same of names that changed since the last call."""
        changed, self._changed = self._changed, {}
        return self._encoded(list(changed))

    def _encoded(self, names: list[str]) -> Iterator[bytes]:
        for first in range(0, len(names), _ROWS_PER_PIECE):
            yield _encode(
                [
                    (name, known.last, known.used_ms, known.partial)
                    for name in names[first : first + _ROWS_PER_PIECE]
                    if (known := self._known.get(name)) is not None
                ]
            )

    def apply(self, piece: bytes) -> int:
        """A piece; returns its rows. Raises DataDirectoryError."""
        try:
            rows = _decode_rows(piece)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DataDirectoryError(f"rows of producers are damaged: {error}") from error
        for name, last, used_ms, partial in rows:
            self._known[name] = _Known(last, used_ms, partial)
        return len(rows)
