"""Chunks that a consumer receives: put together, or streamed, and acknowledged, given back or let go of as one message.

    delivery with chunks --parts--> deliveries of what is no chunk | ChunkedDelivery, a message: queued like any other
                              |
                              `--> Assembler (proto.chunks): what cannot be finished now is let go

What may never be finished is a *doubt*, and the broker is asked (UnfinishedMessage): only it knows whether more is stored,
and still to be delivered. While entries cannot be read, and while it cannot be asked, nothing is dropped:

    a message gets no chunk for `expire_s`   may its producer send more?           no: where may it end?
    the same once more                       is anything before that end to come?  else given back | no: dropped
    a chunk without those before it          is any to come, or do others hold it? yes: given back | no: dropped

*Whole* (the default): a message is queued when its last chunk has come. What it has until then costs no permits, so that a
message with more chunks than the receiver queue holds can be finished; the bytes of all unfinished ones are bounded by
max_pending_chunked_messages * max_chunked_message_bytes.

*Streamed* (stream_chunks): it is queued with its first chunk, and what nobody has read of it fills the receiver queue, which
holds the rest back at the broker. Once it is acknowledged or nacked nobody reads the rest: it is not kept. Where the chunks
of several messages alternate, those of messages that are still queued may leave no room for one that is read:

    queue of 3 chunks, A is read:  B0 C0 D0 | A1 B1 C1 D1 ...    A1 waits at the broker: B, C and D are put off
                                            | A2 ... A4          is read to its end; B1, C1 ... are not kept
    the next message is taken:     B is given back as a whole, C and D as well: they come again, as if for the first time
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from magnetar.proto.batch_extensions import Chunk, entry_extensions
from magnetar.proto.chunks import Assembler, Key, LetGo, Unfinished
from magnetar.proto.commands import AckRow
from magnetar.proto.errors import AlreadyClosed, InvalidArgument, MagnetarError, MessageLost, MessageTooLarge
from magnetar.proto.ids import MessageId
from magnetar.proto.ranges import Range, complement
from magnetar.runtime.tasks import begin

from ..chunked_id import ChunkedMessageId, last_place
from ..durations import in_seconds
from ..messages import ACKED, GIVEN_BACK, QUEUED, UNACKED, ChunkedMessage, Delivery, Failure, StreamedMessage
from ..options import INDIVIDUAL_TYPES, ConsumerOptions
from ..receipts import copy_of
from .acknowledger import Acknowledger
from .resume_point import ResumePoint
from .window import Window

_log = logging.getLogger(__name__)

# A chunk that came before the one in front of it is asked for again after that time, in seconds.
AHEAD_S = 0.1
# How many deliveries that came since the first chunk of an unfinished message are remembered, for cumulative acks.
MAX_REMEMBERED_ROWS = 100_000


class ChunkedDelivery(Delivery):
    """A message in chunks, under the id of its first one. finished: all of them have come."""

    __slots__ = ("_max_bytes", "finished", "id", "pieces", "whole")

    message_type = ChunkedMessage

    def __init__(self, first: Delivery, message: Unfinished[AckRow], max_bytes: int) -> None:
        """`first`: its first chunk, of which all but the value is used."""
        first.copy_to(self)
        super().let_go_of_values()
        self.id = ChunkedMessageId.of(first.first_id, message.places)
        self.permits, self.bytes = 1, 0
        self.pieces: deque[bytes] = deque()
        self.finished = False
        (extensions,) = entry_extensions(self.entry).values()
        self.whole = extensions.whole
        self._max_bytes = max_bytes

    @property
    def first_id(self) -> ChunkedMessageId:
        """See Delivery."""
        return self.id

    def values(self) -> list[bytes | None]:
        """See Delivery; once."""
        value = b"".join(self.pieces)
        self.pieces.clear()
        return [self._decoded(lambda _: self.whole.value(value, self._max_bytes) if self.whole else value)]

    def rows(self, first: int, end: int) -> list[AckRow]:
        """See Delivery: all of its chunks."""
        return self.id.chunks

    def let_go_of_values(self) -> None:
        """See Delivery: it has none."""


class StreamedDelivery(ChunkedDelivery):
    """The same while it is coming: an iterator over its value. `taken_at`: when somebody took a piece, or it was begun.

    `opened`: it is not queued any more. `put_off`: it never will be; when its turn has come it is given back.
    """

    __slots__ = ("_arrived", "_compressed", "_error", "_intake", "opened", "put_off", "taken_at")

    message_type = StreamedMessage

    def __init__(
        self, first: Delivery, message: Unfinished[AckRow], max_bytes: int, intake: ChunkIntake, now: float
    ) -> None:
        super().__init__(first, message, max_bytes)
        self._compressed: list[bytes] = []  # read pieces of a value that was compressed as a whole, by Pulsar
        self.permits = 0  # what waits in `pieces` counts
        self._intake = intake
        self._arrived = asyncio.Event()
        self._error: MagnetarError | None = None
        self.opened = self.put_off = False
        self.taken_at = now

    def values(self) -> list[bytes | None]:
        """See Delivery: it has to be read."""
        self.opened = True
        if self.put_off:
            self._intake.give_back(self)
        return [None]

    def feed(self, piece: bytes, *, last: bool) -> None:
        """The next piece."""
        self.finished = last
        if not self.ended and not self.put_off:
            self.pieces.append(piece)
            self._arrived.set()

    def end(self, error: MagnetarError) -> None:
        """Nothing more is read, and what is here is let go."""
        self._error = self._error or error
        self.pieces.clear()
        self._arrived.set()

    @property
    def ended(self) -> bool:
        """True if nothing more of it is to be kept."""
        return self._error is not None

    def close(self) -> None:
        """The rest is not wanted. What has not come yet is not kept either."""
        self.end(AlreadyClosed(f"the stream of message {self.id} was closed"))
        self._intake.on_taken()

    def __aiter__(self) -> StreamedDelivery:
        return self

    async def __anext__(self) -> bytes:
        """Raises MessageLost if the message comes again as another one, AlreadyClosed if nothing more will come."""
        whole = self.whole
        if whole is None or not whole.codec:
            return await self._next_piece()
        try:
            while True:
                self._compressed.append(await self._next_piece())
        except StopAsyncIteration:
            if not self._compressed:
                raise
        value = b"".join(self._compressed)
        self._compressed.clear()
        return self._decoded(lambda _: whole.value(value, self._max_bytes))

    async def _next_piece(self) -> bytes:
        while not self.pieces:
            if self._error is not None:
                raise copy_of(self._error)
            if self.finished:
                raise StopAsyncIteration
            self._arrived.clear()
            self._intake.awaited.add(self)
            self._intake.make_room()
            try:
                await self._arrived.wait()
            finally:
                self._intake.awaited.discard(self)
        self.taken_at = asyncio.get_running_loop().time()
        piece = self.pieces.popleft()
        self._intake.on_taken()
        return piece


class AskUnfinished(Protocol):
    """Sends UnfinishedMessage."""

    async def __call__(
        self, key: Key, until: MessageId | None, *, held: bool
    ) -> tuple[bool, MessageId | None]:
        """The answer: `lost`, `end`. Raises MagnetarError."""


class _Doubt(NamedTuple):
    """What may never be finished: of a `message` that is silent, or chunks that were let go."""

    let_go: LetGo[AckRow]
    epoch: int
    chunks: int  # of the message, by then


class ChunkIntake:
    """The chunks of one consumer."""

    def __init__(
        self,
        what: str,
        options: ConsumerOptions,
        acknowledger: Acknowledger,
        position: ResumePoint,
        window: Window,
        queue: Callable[[Delivery | Failure], object],
        on_taken: Callable[[], object],
        ask: AskUnfinished,
    ) -> None:
        """queue: to be handed out. on_taken: there may be room for more. ask: the broker, see UnfinishedMessage."""
        self._ask = ask
        self._doubts = deque[_Doubt]()  # the first one is asked about
        self.asking: asyncio.Task[None] | None = None
        self.dropped = 0  # messages and chunks that nobody will ever finish
        self._window = window
        self._what = what
        self._acknowledger = acknowledger
        self._position = position
        self._queue = queue
        self.on_taken = on_taken
        self._loop = asyncio.get_running_loop()
        self._streams = options.stream_chunks
        self._durable = options.durable
        self._expire_s = in_seconds(options.expire_incomplete_chunked_messages)
        self._again_s = min(
            in_seconds(options.nack_delay), self._expire_s / 2
        )  # what is given back comes after that
        self._max_bytes = options.max_chunked_message_bytes
        self._assembler = Assembler[AckRow](
            options.max_pending_chunked_messages, self._max_bytes, self._expire_s, holds=not self._streams
        )
        self.reading: dict[StreamedDelivery, Unfinished[AckRow]] = {}  # coming, or with something to be read
        self.awaited = set[StreamedDelivery]()  # somebody waits for their next pieces
        self.waits_since: float | None = None  # when the program began to wait for a message, if it does
        self._timer: asyncio.TimerHandle | None = None
        # Where acknowledgements may be cumulative: messages whose last chunk may lie behind what is acknowledged, what was
        # delivered since the first one of these began, and the last message in front of it.
        self.in_order = options.type not in INDIVIDUAL_TYPES
        self.open: list[ChunkedDelivery] = []
        self._since: list[AckRow] = []
        self._forgot = False  # some of these
        self._before: MessageId | None = None
        # Epoch and place of the last message that was taken in, before the delivery that is. Of each, so no id.
        self.last: tuple[int, int, int, int] | None = None

    # --- in ----------------------------------------------------------------------------------------------------------

    def remember(self, delivery: Delivery) -> None:
        """It came after the first chunk of an open message. Before `take`."""
        self._forget_done()
        if self.open and self._durable:
            self._since += delivery.rows(0, delivery.count)
            if len(self._since) > MAX_REMEMBERED_ROWS:
                _log.warning(
                    "%s: %d deliveries have come since message %s began, which is not whole or not acknowledged yet: "
                    "until it is, what is acknowledged cumulatively behind it may come again; `ack` acknowledges it at once",
                    self._what, len(self._since), self.open[0].id,
                )  # fmt: skip
                self._since.clear()
                self._forgot = True

    def has_had(self, last: MessageId) -> bool:
        """True if the message with this id was delivered, or one behind it; only of types in order."""
        return self.last is not None and self.last[1:] >= last[:3]

    def take(self, delivery: Delivery) -> None:
        """Queues what a delivery with chunks has, in its order."""
        entry, at = delivery.entry, 0
        try:
            found = entry_extensions(entry)
        except MagnetarError:
            found = {}  # it is damaged, as whoever opens it learns
        for position, extensions in found.items():
            if extensions.chunk is not None:
                if position > at:
                    self._queue(delivery.part(at, position))
                at = position + 1
                part = delivery.part(position, at)
                if part.flags[0] == UNACKED:
                    self._take_chunk(delivery, part, extensions.chunk)
        if at < entry.batch_count:
            self._queue(delivery.part(at, entry.batch_count))
        self._set_timer()

    def _take_chunk(self, whole: Delivery, part: Delivery, chunk: Chunk) -> None:
        try:
            (value,) = part.values()
        except MagnetarError as error:
            self._queue(Failure(part.epoch, error))
            return
        now, piece, producer = self._loop.time(), value or b"", part.producer_name(0)
        (place,) = part.rows(0, 1)
        known = self._assembler.find(producer, chunk.chunk_id)
        if known is not None:
            comes_again = known.sink.flags[0] == GIVEN_BACK  # and begins anew
            if chunk.index > (0 if comes_again else known.next_index):
                # The one in front of it is on its way again; or it was acknowledged, and is not among what is before this.
                self._acknowledger.give_back_rows(known.key, [place], AHEAD_S)
                known.end = min(known.end or part.first_id, part.first_id)
                return
            if comes_again:
                self._assembler.remove(known)
        added = self._assembler.add(producer, chunk, place, piece, now)
        for let_go in added.let_go:
            if let_go.orphan:
                self._doubt(let_go, part.epoch)
            else:
                self._let_go(let_go)
        message = added.message
        if message is None:
            return
        delivery: ChunkedDelivery | None = message.sink
        if delivery is None:
            delivery = message.sink = self._begin(whole, part, message, now)
        if isinstance(delivery, StreamedDelivery):
            if self._settled(delivery):
                self._pass_on(delivery, [place])
            elif not added.repeated:
                delivery.feed(piece, last=message.finished)
        elif message.too_large:
            if not delivery.bytes:
                delivery.bytes = message.size
                self._queue(Failure(part.epoch, self._too_large(delivery)))
        elif message.finished:
            delivery.finished = True
            if not self._position.was_handed_out(last_place(delivery.id)):
                delivery.pieces.extend(message.pieces)
                delivery.bytes = message.size
                self._queue(delivery)

    def _begin(
        self, whole: Delivery, part: Delivery, message: Unfinished[AckRow], now: float
    ) -> ChunkedDelivery:
        for doubt in [one for one in self._doubts if one.let_go.orphan and one.let_go.key == message.key]:
            self._doubts.remove(doubt)  # what was missing comes
            self._let_go(doubt.let_go)
        delivery = ChunkedDelivery(part, message, self._max_bytes)
        if self._streams:
            delivery = StreamedDelivery(part, message, self._max_bytes, self, now)
            self.reading[delivery] = message
            self._queue(delivery)
        if self.in_order:
            self._forget_done()
            if not self.open:
                first = part.first_id
                self._before = first._replace(index=first.index - 1)
                if part.base_index == whole.base_index:
                    self._before = None if self.last is None else MessageId(*self.last[1:], first.partition)
                if self._before is not None and self._before > first:
                    self._before = None  # it comes again, behind others
                self._since = [AckRow(part.ledger, part.entry_id, first.index, whole.last_id.index)]
                self._forgot = False
            self.open = [*(one for one in self.open if one.id != delivery.id), delivery]
        return delivery

    def _too_large(self, delivery: ChunkedDelivery) -> MagnetarError:
        return MessageTooLarge(
            f"{self._what}: message {delivery.id} exceeds max_chunked_message_bytes ({self._max_bytes}); raise that, or set "
            'stream_chunks=True; acknowledging details["id"] passes over it',
            id=delivery.id,
        )

    # --- streams -----------------------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        """The broker may send nothing, because of what nobody has taken."""
        return not (self._window.paused or self._window.has_permits)

    def make_room(self) -> None:
        """Puts off what is queued if it leaves no room for a stream that is awaited."""
        if self.awaited and self._is_full:
            for delivery in [one for one in self.reading if not one.opened]:
                del self.reading[delivery]
                delivery.put_off = True
                delivery.pieces.clear()
            self.on_taken()

    def give_back(self, delivery: StreamedDelivery) -> None:
        """What was put off comes again, from its first chunk on."""
        if not self._settled(
            delivery
        ):  # else it comes again at its time, and is not to be taken for nacked then
            delivery.flags[0] = GIVEN_BACK
            self._acknowledger.redeliver(delivery.id.chunks, counted=False)

    def held(self) -> tuple[int, int]:
        """Pieces and bytes that wait to be read; what is acknowledged or nacked by now is not kept for that."""
        messages = size = 0
        for delivery in list(self.reading):
            if self._settled(delivery):
                self._pass_on(delivery, [])
            elif delivery.finished and not delivery.pieces:
                del self.reading[delivery]
            else:
                messages += len(delivery.pieces)
                size += sum(map(len, delivery.pieces))
        return messages, size

    def _settled(self, delivery: ChunkedDelivery) -> bool:
        """True if the program has decided about the message, which may still be coming."""
        return delivery.flags[0] != UNACKED or self._acknowledger.is_nacked(delivery.id)

    def _pass_on(self, delivery: StreamedDelivery, places: list[AckRow]) -> None:
        """What comes of such a message is acknowledged, too; or it is among what is given back when its time has come."""
        delivery.end(
            MessageLost(f"message {delivery.id} was acknowledged or nacked before all of it was read")
        )
        self.reading.pop(delivery, None)
        if delivery.flags[0] in (QUEUED, ACKED):
            self._acknowledger.ack_rows(places)

    # --- what is let go ----------------------------------------------------------------------------------------------

    def _doubt(self, let_go: LetGo[AckRow], epoch: int) -> None:
        self._doubts.append(_Doubt(let_go, epoch, len(let_go.places)))
        if self.asking is None:
            self.asking = begin(self._settle_doubts(), f"chunks of {self._what}")

    async def _settle_doubts(self) -> None:
        try:
            while self._doubts:
                await self._settle(self._doubts[0])
        finally:
            self.asking = None

    async def _settle(self, doubt: _Doubt) -> None:
        """Drops it, or gives chunks back and goes on waiting for a message."""
        let_go, message = doubt.let_go, doubt.let_go.message
        until: MessageId | None = MessageId(*let_go.places[0][:3]) if message is None else message.end
        lost, end = False, None  # as far as is known
        # What is still to be given back is nothing that the broker has to deliver.
        if until is None or not self._acknowledger.gives_back_before(let_go.key, until[:3]):
            try:
                lost, end = await self._ask(let_go.key, until, held=message is None)
            except MagnetarError as error:
                _log.info(
                    "%s: whether a message in chunks can be finished is not known: %s", self._what, error
                )
        if not self._doubts or self._doubts[0] is not doubt:
            return  # it comes again, or nothing more comes
        self._doubts.popleft()
        if message is None:
            self._let_go(let_go, dropped=lost)
        elif self._assembler.find(*message.key) is message and len(message.places) == doubt.chunks:
            # No chunk has come since it was asked about.
            if lost and end is not None:
                self._assembler.remove(message)
                self._let_go(let_go._replace(why=f"{let_go.why}, and none is to come"), dropped=True)
            elif (
                message.asked
            ):  # what is to come may be waiting for what is here, or come to another consumer
                self._assembler.remove(message)
                self._let_go(let_go)
            else:
                message.asked, message.end = True, message.end or end

    def _let_go(self, let_go: LetGo[AckRow], *, dropped: bool = False) -> None:
        delivery: ChunkedDelivery | None = None if let_go.message is None else let_go.message.sink
        first = let_go.places[0]
        what = f"the message in chunks at {first.ledger}:{first.entry}:{first.first_index}"
        if delivery is not None:
            if dropped and delivery in self.open:
                self.open.remove(
                    delivery
                )  # else it comes again, and is not acknowledged by what lies behind it
            if self._settled(delivery):
                return
            if isinstance(delivery, StreamedDelivery):
                self.reading.pop(delivery, None)
                delivery.end(MessageLost(f"{self._what}: {what} is let go: {let_go.why}"))
        if dropped:
            self.dropped += 1
            _log.warning("%s: %s is acknowledged, and never seen whole: %s", self._what, what, let_go.why)
            self._acknowledger.ack_rows(let_go.places)
        else:
            _log.info("%s: %s is given back, to be delivered again: %s", self._what, what, let_go.why)
            flags = None if delivery is None else delivery.flags
            self._acknowledger.give_back_rows(let_go.key, let_go.places, self._again_s, flags)

    def _set_timer(self) -> None:
        due = self._assembler.next_due
        if due is None and self.reading:
            due = self._loop.time() + self._expire_s
        if self._timer is None and due is not None:
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        idle = {one: message for one, message in self.reading.items() if now - one.taken_at >= self._expire_s}
        # Whoever waits for the rest of one does not take what is in the way of it, and would wait for ever.
        stuck = [one for one in idle if one in self.awaited] if self._is_full else []
        if stuck or (self.waits_since is not None and now - self.waits_since >= self._expire_s):
            unread = [one for one in idle if one.pieces]
            why = "nobody reads it, and others wait"
            if not unread:
                why = "its chunks wait behind messages that fill the receiver queue"
            for delivery in unread or stuck:
                message = idle[delivery]
                self._assembler.touch(message, now)  # what comes of it until its time is given back with it
                self._let_go(LetGo(why, message.key, message.places, message))
        why = f"no chunk of it came within {self._expire_s:g} s"
        for message in self._assembler.silent(now):
            if message.sink.flags[0] != UNACKED:
                self._assembler.remove(message)
                continue
            self._assembler.touch(message, now)
            if not self._acknowledger.is_nacked(message.sink.id):
                self._doubt(LetGo(why, message.key, message.places, message), message.sink.epoch)
        self._set_timer()
        self.on_taken()

    def first_open(self) -> MessageId | None:
        """Where the first message begins that was not handed out as a whole."""
        self._forget_done()
        return min((one.first_id for one in self.open), default=None)

    def clear(self, error: MagnetarError, before_epoch: int) -> None:
        """What came in an older epoch comes again, or nothing more comes. What has come as a whole can be read on."""
        for message in self._assembler.unfinished:
            delivery: ChunkedDelivery = message.sink
            if delivery.epoch < before_epoch:
                self._assembler.remove(message)
                if isinstance(delivery, StreamedDelivery):
                    delivery.end(error)
        self.reading = {one: message for one, message in self.reading.items() if one.epoch >= before_epoch}
        self._doubts = deque(one for one in self._doubts if one.epoch >= before_epoch)
        self.open = [one for one in self.open if one.epoch >= before_epoch]
        if not self.open:
            self._since.clear()
        if self.last is not None and self.last[0] < before_epoch:
            self.last = None
        if self._timer is not None and not self.reading and self._assembler.next_due is None:
            self._timer.cancel()
            self._timer = None

    # --- acknowledging everything up to a message --------------------------------------------------------------------

    def _forget_done(self) -> None:
        self.open = [one for one in self.open if not self._is_done(one)]

    def _is_done(self, delivery: ChunkedDelivery) -> bool:
        if self._durable:
            return delivery.flags[0] in (QUEUED, ACKED)
        handed_out = delivery.finished and not self._position.is_behind(last_place(delivery.id))
        return handed_out and delivery.flags[0] != GIVEN_BACK

    def up_to(self, message_id: MessageId, *, receipt: bool) -> tuple[MessageId | None, list[AckRow]]:
        """What is acknowledged by acknowledging everything up to a message: everything up to another one, and some rows.

        A message in chunks comes when its last chunk has. So one that ends behind the message is not acknowledged by it,
        though its first chunks stand before the message. What was forgotten by then is acknowledged with the next message
        behind that one; for a receipt, which promises more, it raises InvalidArgument.
        """
        last = last_place(message_id)
        for one in self.open:
            if one.id == message_id:
                one.flags[0] = ACKED  # what is still to come of it as well
        self._forget_done()
        waiting = [
            one for one in self.open if one.id <= last and not (one.finished and last_place(one.id) <= last)
        ]
        if not waiting:
            self.open = [one for one in self.open if one.id > last]
            return last, []
        if receipt and self._forgot:
            raise InvalidArgument(
                f"{self._what}: more than {MAX_REMEMBERED_ROWS} deliveries have come since message {waiting[0].id} began, "
                "which is not whole yet: what lies behind it cannot be acknowledged cumulatively with a receipt; "
                "acknowledge the messages by `ack`, or without a receipt"
            )
        held: dict[tuple[int, int], list[Range]] = {}
        for one in waiting:
            for ledger, entry, first_index, last_index in one.id.chunks:
                held.setdefault((ledger, entry), []).append((first_index, last_index))
        rows: list[AckRow] = []
        since, self._since = self._since, []
        for ledger, entry, first_index, last_index in since:
            end = last_index if (ledger, entry) < last[:2] else -1
            if (ledger, entry) == last[:2]:
                end = min(last_index, last.index)
            if end < last_index:
                self._since.append(AckRow(ledger, entry, max(first_index, end + 1), last_index))
            if first_index <= end:
                chunks = [one for one in held.get((ledger, entry), ()) if first_index <= one[0] <= end]
                rows += [AckRow(ledger, entry, *one) for one in complement(sorted(chunks), first_index, end)]
                self._since += [AckRow(ledger, entry, *one) for one in chunks]  # until it has all come
        return self._before, rows
