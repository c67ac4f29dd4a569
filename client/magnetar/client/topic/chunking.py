"""Messages that are too large for a batch: cut into chunks, which are sent one after another and settle together.

    source --pieces--> one chunk ahead (is it the last?) --room within max_pending_bytes--> outbox --> ...

All chunks have the message's sequence id, so nothing else is sent by the producer between them: whoever sends meanwhile
waits. A chunk is a group of its own in the outbox (`ChunkGroup`); the message's receipt is of `ChunkGroup.whole`, which is
stored when its last chunk is, under the id of its first one. When one chunk fails all that are left fail. A source that ends
with an error, or a call that is cancelled, leaves a message without its last chunk, which consumers let go of.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any, BinaryIO

from magnetar.proto.batch import Columns
from magnetar.proto.batch_extensions import EXT_CHUNK, EXT_WHOLE, Chunk, WholeMessage
from magnetar.proto.errors import InvalidArgument, MagnetarError

from ..receipts import Group
from .columns import Row

Source = bytes | bytearray | memoryview | BinaryIO | Iterable[bytes] | AsyncIterable[bytes]
"""What `send_stream` takes: bytes, a file that is open for reading bytes, or an iterable of bytes, asynchronous or not."""

# So much of a message has to fit into a chunk beside its key and its properties.
MIN_PIECE_BYTES = 64


class ChunkGroup(Group):
    """One chunk of a message, a group of the outbox. The message settles with its last chunk, or with one that fails."""

    __slots__ = ("_whole", "chunk", "extensions")

    def __init__(self, whole: Group, chunk: Chunk, message: WholeMessage | None) -> None:
        super().__init__(whole.first_sequence_id)
        self._whole = whole
        self.chunk = chunk
        self.extensions: dict[int, Any] = {EXT_CHUNK: chunk}  # of its batch
        if message is not None:
            self.extensions[EXT_WHOLE] = message

    @property
    def whole(self) -> Group:
        """The message."""
        return self._whole

    def confirm(self, message_count: int, ledger: int, entry: int, index: int) -> bool:
        """See Group."""
        whole = self.whole
        if self.chunk.index == 0:
            whole.runs.append((0, ledger, entry, index))  # it is stored there once its last chunk is
        if self.chunk.last and not whole.settled:
            _, *place = whole.runs.pop()
            whole.confirm(1, *place)
        return super().confirm(message_count, ledger, entry, index)

    def fail(self, error: MagnetarError) -> None:
        """See Group."""
        super().fail(error)
        if not self.whole.settled:
            self.whole.fail(error)


class ChunkedMessage:
    """A message that is sent in chunks. group: what its receipt is of.

    All chunks have its key and its delivery time. Its properties and its event time stand in the first one, from which
    native consumers take them, and in the last one, from which those of Pulsar's protocol do.
    """

    def __init__(self, group: Group, chunk_id: bytes, row: Row, whole: WholeMessage | None) -> None:
        """`row`: the message, whose value does not matter. `whole`: what it is, if that is known already."""
        group.message_count = 1
        self.group = group
        self._chunk_id = chunk_id
        self._row = row._replace(sequence_id=None)
        self._next_index = 0
        self._whole = whole

    def next_chunk(self, piece: bytes, *, last: bool) -> tuple[ChunkGroup, Columns]:
        """The next one, to be closed. Raises what an earlier one failed with."""
        if self.group.settled:
            raise self.group.raisable_error()
        row = self._row._replace(value=piece)
        if self._next_index and not last:
            row = row._replace(properties=None, event_time_ms=None)
        chunk = Chunk(self._chunk_id, self._next_index, last)
        self._next_index += 1
        return ChunkGroup(self.group, chunk, self._whole), row.columns()


def whole_message(source: Source, size: int) -> WholeMessage | None:
    """What `pieces_of` makes of the source, if it is known before it was read."""
    if not isinstance(source, bytes | bytearray | memoryview):
        return None
    total = memoryview(source).nbytes
    return WholeMessage(max(1, -(-total // size)), total)


async def pieces_of(source: Source, size: int) -> AsyncGenerator[tuple[bytes, bool], None]:
    """What the source has, in pieces of `size` bytes and a last one, and whether it is the last. At least one.

    At most two pieces are in memory, and what the source gives at once.
    """
    left = bytearray()
    async for some in _read(source, size):
        if not isinstance(some, bytes | bytearray | memoryview):
            raise InvalidArgument(
                f"a source of send_stream gives bytes, not {type(some).__name__}; open files with mode 'rb'"
            )
        view = memoryview(some).cast("B")
        while len(left) + len(view) > size:
            taken = size - len(left)
            left += view[:taken]
            view = view[taken:]
            yield bytes(left), False
            left.clear()
        left += view
    yield bytes(left), True


async def _read(source: Any, size: int) -> AsyncIterator[Any]:
    if isinstance(source, bytes | bytearray | memoryview):
        yield source
    elif hasattr(source, "read"):
        while True:
            # A slow disk or pipe stops this call only, not the loop.
            some = await asyncio.to_thread(source.read, size)
            if inspect.isawaitable(some):
                some = await some
            if not some and some is not None:  # None: a file that does not block has nothing yet
                return
            yield some
    elif isinstance(source, AsyncIterable):
        async for some in source:
            yield some
    elif isinstance(source, Iterable) and not isinstance(source, str):
        coming = iter(source)
        while found := await asyncio.to_thread(_some_of, coming, size):
            for some in found:
                yield some
    else:
        raise InvalidArgument(
            f"send_stream takes bytes, a binary file or an iterable of bytes, not {type(source).__name__}"
        )


def _some_of(coming: Iterator[Any], size: int) -> list[Any]:
    """About `size` bytes of what comes, which may take long: not in the loop's thread."""
    found: list[Any] = []
    for some in coming:
        found.append(some)
        size -= len(some) if hasattr(some, "__len__") else size  # what is no bytes is refused by `pieces_of`
        if size <= 0:
            break
    return found
