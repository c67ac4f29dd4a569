"""One consumer of a connection: deliveries become MESSAGE frames; FLOW, ACK, REDELIVER, SEEK calls on its subscription.

    SUBSCRIBE --open--> attached --SUCCESS is sent, begin--> ACTIVE_CONSUMER_CHANGE, and on FLOW messages
        |--its topic ends it, or somebody moves its subscription--> CLOSE_CONSUMER: the client subscribes again
        `--CLOSE_CONSUMER, UNSUBSCRIBE, the connection is lost--> released

**Ids** name batches by their first message, and mean a whole one unless they have an ack set, or name a message that went
out ALONE. Where a batch ends `borders` knows of what was delivered here; else (it was delivered on an earlier connection)
the entry is looked up, and the answer waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from magnetar.proto.batch import DecodedBatch
from magnetar.proto.batch_extensions import EXT_BATCH_OF_ONE
from magnetar.proto.entry import Entry
from magnetar.proto.errors import (
    AlreadyClosed,
    InvalidArgument,
    MagnetarError,
    SubscriptionNotFound,
    TooManyRequests,
    Unsupported,
)
from magnetar.proto.ids import MessageId, TopicName
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.commands import NO_REQUEST, encode
from magnetar.proto.pulsar.ids import (
    ALONE,
    EARLIEST,
    INDEX_BITS,
    LAST_INDEX,
    LATEST,
    ack_set_bits,
    decode_ack_set,
    lowest_bit,
    pack_entry,
    signed,
    unpack_entry,
    unsigned,
)
from magnetar.proto.ranges import Range

from ...cursors.core.acks import AckRange, EntryKey
from ...dispatch.core import consumer as dispatch
from ...dispatch.core.selection import SELECTORS
from ...dispatch.core.selection.hash_ranges import SLOTS
from ...dispatch.subscription import SubscribeRequest
from ...log.positions import Start
from ...service.broker import BrokerService
from ...service.results import ConsumerOpened
from ..requests import Requests
from .borders import UNBATCHED, Borders, borders_of, end_of_batch, end_of_id, start_of_batch
from .errors import error_text, server_error
from .messages import messages_of
from .ports import Link, metadata_of
from .schemas import schema_of
from .transcoded import Transcoded

_log = logging.getLogger(__name__)

# How those clients call themselves that know REACHED_END_OF_TOPIC: others close their connection when it comes.
_KNOW_THE_END = ("Pulsar-Java", "DotPulsar")
_VERSION_OF_ACTIVE_CONSUMER_CHANGE = 12
_SMALL_BYTES = 1024  # pieces of this size on average are copied
# What one ACK or REDELIVER may acknowledge with its ack sets, each of which may be of 16,384: it takes 0.1 s.
MAX_RANGES = 100_000

# Where the batches of entries end: of those that were delivered, or were looked up. None: there is no such entry.
Known = Mapping[EntryKey, Sequence[int] | None]


class Consumer:
    """See the module docstring. It is the port of its consumer (`dispatch.core.consumer.ConsumerPort`) as well."""

    __slots__ = (
        "_ack_sets", "_begun", "_borders", "_command", "_epoch", "_individual", "_on_ended", "_opened", "_partition",
        "_requests", "_service", "_told_end", "_topic", "_transcoded", "_type", "consumer_id", "peer",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        service: BrokerService,
        requests: Requests,
        transcoded: Transcoded,
        command: wire.CommandSubscribe,
        on_ended: Callable[[Consumer], None],
    ) -> None:
        """`on_ended`: it left by itself, and its id holds nothing any more. Raises InvalidTopicName."""
        self.peer = link
        self.consumer_id = command.consumer_id
        self._opened: ConsumerOpened | None = None  # it refers to this: from `open` until it has left
        self._service = service
        self._requests = requests
        self._transcoded = transcoded
        self._command = command
        self._on_ended = on_ended
        self._topic = TopicName.parse(command.topic)
        self._partition = self._topic.partition
        self._type = wire.CommandSubscribe.SubType.Name(command.sub_type).lower()
        self._individual = SELECTORS[self._type].individual_acks
        # A number of the client's, with which it tells apart what it had asked for before; None: it has none.
        self._epoch = command.consumer_epoch if command.HasField("consumer_epoch") else None
        self._ack_sets = not self._individual  # it is sent them: with individual acks once it has sent one
        self._begun = False
        self._told_end = False
        self._borders = Borders()

    # --- opening and end ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Attaches it to its subscription, as SUBSCRIBE asks. Nothing is sent. Raises MagnetarError."""
        asked = self._asked()
        self._opened = await self._service.subscribe(
            self.peer, self._command.topic, asked, port=self, schema=schema_of(self._command)
        )
        self._opened.consumer.metadata = metadata_of(self._command)

    def _asked(self) -> SubscribeRequest:
        command = self._command
        start: Start = ("latest", None)
        if not self._topic.persistent:
            pass  # of what came before nothing is left for Pulsar's consumers, though some of it is in memory here
        elif back_ms := 1000 * command.start_message_rollback_duration_sec:
            start = ("time", max(self._service.clock.now_ms() - back_ms, 0))
        elif not command.durable and command.HasField("start_message_id"):
            start = self._start_at(command.start_message_id)
        elif command.initial_position == wire.CommandSubscribe.EARLIEST:
            start = ("earliest", None)
        ranges: list[Range] = []
        meta = command.key_shared_meta
        if SELECTORS[self._type].hash_ranges and meta.key_shared_mode == wire.KeySharedMeta.STICKY:
            # Java lets 65,536 be the end, which is behind the last one.
            ranges = [(one.start, one.end - (one.end == SLOTS)) for one in meta.hash_ranges]
            if not ranges:
                raise InvalidArgument("a consumer with sticky hash ranges must name one at least")
        return SubscribeRequest(
            command.subscription,
            self._type,
            start,
            durable=command.durable,
            name=command.consumer_name,
            priority_level=command.priority_level,
            hash_ranges=ranges,
            create=command.force_topic_creation,
            read_compacted=command.read_compacted,
            properties={one.key: one.value for one in command.subscription_properties},
        )

    @property
    def opened(self) -> ConsumerOpened:
        """What it has open. Raises AlreadyClosed once it has left, to whatever goes on for it."""
        if self._opened is None:
            raise AlreadyClosed(f"consumer {self.consumer_id} is closed")
        return self._opened

    def begin(self) -> None:
        """SUCCESS is sent; from now on something may be sent to the consumer."""
        self._begun = True
        if self._type == "failover":
            if self._active is self.opened.consumer:
                self._tell_all()
            else:
                self._tell_active(False)

    def release(self, *, lost: bool, returns: bool = False) -> None:
        """Leaves its subscription: the client closed it, or (`lost`) its connection is gone."""
        self.opened.subscription.remove_consumer(self.opened.consumer, lost=lost, returns=returns)
        self._opened = None

    def _end(self, *, returns: bool = False) -> None:
        """It leaves by itself: the client learns that, and subscribes again."""
        self.release(lost=False, returns=returns)
        self._on_ended(self)
        self.peer.send(encode(wire.CommandCloseConsumer(consumer_id=self.consumer_id, request_id=NO_REQUEST)))

    async def unsubscribe(self, command: wire.CommandUnsubscribe) -> None:
        """The subscription is deleted, and the consumer with it, when this returns. Raises ConsumerBusy unless `force`."""
        await self._service.unsubscribe(self.peer, self.opened, force=command.force)
        self._opened = None
        self._on_ended(self)

    # --- ConsumerPort ------------------------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """False while the connection's write buffer is full."""
        return self.peer.writable

    def sought(self) -> None:
        """CLOSE_CONSUMER: what the client holds means nothing any more, and its permits neither."""
        self._end(returns=True)

    def consumer_closed(self, error: MagnetarError) -> None:
        """CLOSE_CONSUMER: the topic ended it."""
        self._end()

    def entry_unreadable(self, epoch: int, key: EntryKey, error: MagnetarError, *, lost: bool) -> None:
        """Pulsar has no command for this: the consumer waits, and the subscription's figures say why."""

    def end_of_topic(self, epoch: int, redelivers: int) -> None:
        """REACHED_END_OF_TOPIC, once, if the client knows it."""
        if not self._told_end and self.peer.client_version.startswith(_KNOW_THE_END):
            self._told_end = True
            self.peer.send(encode(wire.CommandReachedEndOfTopic(consumer_id=self.consumer_id)))

    def active_changed(self, active: bool) -> None:
        """ACTIVE_CONSUMER_CHANGE, which all consumers get on a change: the one that becomes active sees to it."""
        if not self._begun:
            return  # `begin` sees to it
        if active:
            self._tell_all()
        elif self._active is None or not isinstance(self._active.port, Consumer):
            self._tell_active(False)

    @property
    def _active(self) -> dispatch.Consumer | None:
        return self.opened.subscription.dispatcher.core.active

    def _tell_all(self) -> None:
        for consumer in self.opened.subscription.consumers:
            if isinstance(consumer.port, Consumer):
                consumer.port._tell_active(consumer.port is self)

    def _tell_active(self, active: bool) -> None:
        if self._begun and self.peer.protocol_version >= _VERSION_OF_ACTIVE_CONSUMER_CHANGE:
            change = wire.CommandActiveConsumerChange(consumer_id=self.consumer_id, is_active=active)
            self.peer.send(encode(change))

    # --- the way out -------------------------------------------------------------------------------------------------

    def deliver(self, delivery: dispatch.Delivery) -> None:
        """A MESSAGE for each batch, in one write."""
        opened, entry, transcoded = self.opened, delivery.entry, self._transcoded
        # Clients in C++ and Java that do not acknowledge with ack sets acknowledge a batch once the application has all of
        # its messages, and never where they skipped some: those of a batch that is hidden in part go to them one by one.
        sent = messages_of(
            delivery, self.consumer_id, self._partition, self._epoch, transcoded, with_ack_sets=self._ack_sets
        )
        self._borders.remember((delivery.ledger_id, delivery.entry_id), borders_of(entry), sent.cuts)
        self._borders.drop_below(opened.subscription.cursor.state.mark_delete)
        if pieces := sent.pieces:
            size = sum(map(len, pieces))
            if size < _SMALL_BYTES * len(pieces):  # in C, what the transport would do piece by piece
                pieces = [b"".join(pieces)]
            self.peer.write(pieces, size)
        if sent.unsent:  # the client, which does not see them, returns no permits for them
            opened.subscription.flow(opened.consumer, sent.unsent, 0)
        if sent.damaged:
            # As Pulsar's clients acknowledge what they cannot read: else it would count as held for ever.
            key = delivery.ledger_id, delivery.entry_id
            rows = [(*key, *one) for one in sent.damaged]
            opened.subscription.acknowledge(opened.consumer, rows, cumulative=False, done=None)

    # --- acknowledgements --------------------------------------------------------------------------------------------

    def flow(self, command: wire.CommandFlow) -> None:
        """FLOW."""
        self.opened.subscription.flow(self.opened.consumer, command.message_permits, 0)

    def acknowledge_ids(self, ids: Sequence[tuple[int, int]]) -> None:
        """ACKs, each of one id, ledger and packed entry, without ack set and request id (`frames.Acks`)."""
        rows, unknown = self._borders.rows_of(ids)
        if rows:
            self.opened.subscription.acknowledge(self.opened.consumer, rows, cumulative=False, done=None)
        if unknown:
            self.acknowledge(
                wire.CommandAck(
                    consumer_id=self.consumer_id,
                    ack_type=wire.CommandAck.INDIVIDUAL,
                    message_id=[
                        wire.MessageIdData(ledger_id=ledger, entry_id=packed) for ledger, packed in unknown
                    ],
                )
            )

    def acknowledge(self, command: wire.CommandAck) -> None:
        """ACK, and ACK_RESPONSE if it has a request id: once it is durable, or refused."""
        if command.txnid_least_bits or command.txnid_most_bits:
            self._answer(command, Unsupported("there are no transactions here: acknowledge without one"))
        elif command.ack_type == wire.CommandAck.CUMULATIVE and self._individual:
            self._answer(command)  # as Pulsar does, which ignores it
        elif all(key in self._borders for key in _keys(command.message_id)):
            self._apply(command, self._borders)
        else:
            self._requests.ask(
                lambda: self._look_up(command),
                lambda known: self._apply(command, known),
                lambda error: self._answer(command, error),
            )

    async def _look_up(self, command: wire.CommandAck) -> Known:
        return {key: await self._borders_at(key) for key in _keys(command.message_id)}

    async def _borders_at(self, key: EntryKey) -> Sequence[int] | None:
        """Where the batches of an entry end, read if need be; None: there is no such entry."""
        borders = self._borders.get(key)
        if borders is None and (entry := await self._entry(key)) is not None:
            return self._transcoded.borders(key, entry)
        return borders

    async def _entry(self, key: EntryKey) -> Entry | None:
        command = self._command
        return await self._service.entry(self.peer, command.topic, command.subscription, key)

    def _apply(self, command: wire.CommandAck, known: Known) -> None:
        """An acknowledgement of which all entries are known, or were looked up.

        Raises AlreadyClosed if it was closed meanwhile: in a subscription that was moved ids may mean something else.
        """
        through, opened = command.ack_type == wire.CommandAck.CUMULATIVE, self.opened
        if through:
            rows = [row for one in command.message_id[-1:] for row in self._through(one, known)]
        else:
            try:
                rows = self._all_rows(command.message_id, known)
            except TooManyRequests as error:
                self._answer(command, error)
                return
        done = None
        if command.HasField("request_id"):
            done = self._requests.confirmed(
                lambda: self._answer(command), lambda error: self._answer(command, error)
            )
        if rows:
            opened.subscription.acknowledge(opened.consumer, rows, cumulative=through, done=done)
        else:
            self._answer(command)

    def _answer(self, command: wire.CommandAck, error: MagnetarError | None = None) -> None:
        """ACK_RESPONSE, if somebody waits for it."""
        if not command.HasField("request_id"):
            if error is not None:
                _log.info("consumer %d: an acknowledgement is refused: %s", self.consumer_id, error)
            return
        self.peer.send(encode(ack_response(command, error)))

    def _all_rows(self, ids: Iterable[wire.MessageIdData], known: Known) -> list[AckRange]:
        """What ids mean together. Raises TooManyRequests."""
        rows: list[AckRange] = []
        named = set[tuple[int, ...]]()  # clients in C++ repeat the ack set of a batch for each message of it
        for one in ids:
            if one.ack_set:
                self._ack_sets = True
                name = (one.ledger_id, one.entry_id, *one.ack_set)
                if name in named:
                    continue
                named.add(name)
            rows += _rows(one, known)
            if len(rows) > MAX_RANGES:
                raise TooManyRequests(
                    f"a command names more than {MAX_RANGES} ranges of messages; send several"
                )
        return rows

    def _through(self, one: wire.MessageIdData, known: Known) -> list[AckRange]:
        """What a cumulative acknowledgement means: all up to the end of its batch, or to what its ack set has first."""
        ledger, (entry, index) = signed(one.ledger_id), unpack_entry(one.entry_id)
        borders = known.get((ledger, entry)) or UNBATCHED
        end = index + 1 if one.entry_id & ALONE else end_of_batch(borders, index)
        if one.ack_set:
            end = min(index + max(lowest_bit(ack_set_bits(one.ack_set)), 0), end)
        if end and entry >= 0:
            return [(ledger, entry, 0, end - 1)]
        if entry <= 0:  # the place before the first message of a ledger
            topic = self.opened.topic
            before = topic.ledger.list.last_before(ledger) if topic.log.is_known(ledger) else None
            if before is None:
                return []
            ledger, entry = before.ledger_id, before.entries
        return [(ledger, entry - 1, 0, LAST_INDEX)]

    def redeliver(self, command: wire.CommandRedeliverUnacknowledgedMessages) -> None:
        """REDELIVER_UNACKNOWLEDGED_MESSAGES: what it names, or all; of types that deliver in order all, and uncounted."""
        opened = self.opened
        if command.HasField("consumer_epoch"):
            self._epoch = max(command.consumer_epoch, self._epoch or 0)
        rows: list[AckRange] = []
        if self._individual and command.message_ids:
            rows = self._all_rows(command.message_ids, self._borders)
            if not rows:
                return
        opened.subscription.redeliver(opened.consumer, rows, counted=self._individual)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def seek(self, command: wire.CommandSeek) -> None:
        """SEEK: durable when it returns, and Pulsar's consumers of the subscription are closed. Raises MagnetarError."""
        if command.HasField("message_publish_time"):
            start: Start = ("time", command.message_publish_time)
        elif command.HasField("message_id"):
            start = self._start_at(command.message_id)
        else:
            raise InvalidArgument("a seek names a message id or a time")
        await self._service.seek(self.peer, self.opened, start)

    def _start_at(self, one: wire.MessageIdData) -> Start:
        """Where an id means to begin: at its message, which is included. What clients excluded they drop themselves."""
        ledger, (entry, index) = signed(one.ledger_id), unpack_entry(one.entry_id)
        if ledger == EARLIEST:
            return "earliest", None
        if ledger == LATEST:
            return "latest", None
        if entry < 0:
            entry, index = 0, 0
        index += max(lowest_bit(ack_set_bits(one.ack_set)), 0)
        return "id", MessageId(ledger, entry, index).to_bytes()

    async def stats(self, command: wire.CommandConsumerStats) -> wire.CommandConsumerStatsResponse:
        """CONSUMER_STATS: the field `error_code`, which clients look at, stays unset. Raises MagnetarError."""
        opened = self.opened
        stats = await self._service.topic_stats(self.peer, str(opened.topic.name))
        of, consumer = stats.subscriptions.get(opened.subscription.name), opened.consumer
        if of is None:
            raise SubscriptionNotFound(f"subscription {opened.subscription.name!r} was deleted")
        rates = consumer.rates.per_second
        return wire.CommandConsumerStatsResponse(
            request_id=command.request_id,
            msg_rate_out=rates[0],
            msg_throughput_out=rates[1],
            msg_rate_redeliver=rates[2],
            consumer_name=consumer.name,
            available_permits=max(consumer.available_permits, 0),
            unacked_messages=consumer.unacked_messages,
            blocked_consumer_on_unacked_msgs=consumer.blocked_on_unacked_messages,
            address=self.peer.address,
            connected_since="",
            type=of.type.title(),
            msg_rate_expired=0.0,
            msg_backlog=of.backlog_messages,
            message_ack_rate=rates[3],
        )

    async def last_message_id(
        self, command: wire.CommandGetLastMessageId
    ) -> wire.CommandGetLastMessageIdResponse:
        """GET_LAST_MESSAGE_ID: -1:-1 without a message. Raises MagnetarError."""
        last = await self._service.last_message_id(self.peer, self.opened)
        response = wire.CommandGetLastMessageIdResponse(request_id=command.request_id)
        message_id = response.last_message_id
        message_id.ledger_id = message_id.entry_id = unsigned(EARLIEST)
        message_id.partition = self._partition
        message_id.batch_index = -1  # Go takes 0 for what is not set
        entry = None if last is None else await self._entry(last[:2])
        if last is not None and entry is not None:
            borders = self._transcoded.borders(last[:2], entry)
            start = start_of_batch(borders, last.index)
            message_id.ledger_id, message_id.entry_id = last.ledger, pack_entry(last.entry, start)
            if last.index > start or _is_batch_of_one(entry, last.index):
                message_id.batch_index = last.index - start
        mark = response.consumer_mark_delete_position
        mark.ledger_id, mark.entry_id = await self._mark_delete()
        return response

    async def _mark_delete(self) -> tuple[int, int]:
        """The last batch up to which all is acknowledged, which clients compare with the last one: ledger, packed entry."""
        ledger, entry, index = self.opened.subscription.cursor.state.mark_delete
        borders = (await self._borders_at((ledger, entry)) if index else None) or ()
        if start := start_of_batch(borders, index):
            return ledger, pack_entry(entry, start_of_batch(borders, start - 1))
        before = self.opened.topic.ledger.list.last_before(ledger)
        key = (before.ledger_id, before.entries - 1) if before and not entry else (ledger, entry - 1)
        if (found := await self._entry(key)) is None:
            return ledger, unsigned(pack_entry(entry, 0) - 1)
        borders = self._transcoded.borders(key, found)
        return key[0], pack_entry(key[1], start_of_batch(borders, found.message_count - 1))


def ack_response(command: wire.CommandAck, error: MagnetarError | None = None) -> wire.CommandAckResponse:
    """Of an ACK with a request id: it is durable, or why it is not."""
    response = wire.CommandAckResponse(
        consumer_id=command.consumer_id,
        txnid_least_bits=command.txnid_least_bits,
        txnid_most_bits=command.txnid_most_bits,
        request_id=command.request_id,
    )
    if error is not None:
        response.error, response.message = server_error(error), error_text(error)
    return response


def _keys(ids: Iterable[wire.MessageIdData]) -> list[EntryKey]:
    return [(signed(one.ledger_id), signed(one.entry_id) >> INDEX_BITS) for one in ids]


def _rows(one: wire.MessageIdData, known: Known) -> list[AckRange]:
    """What an id means: its batch to the end, or what its ack set leaves out, or one message."""
    ledger, (entry, index) = signed(one.ledger_id), unpack_entry(one.entry_id)
    if entry < 0:
        return []
    borders = known.get((ledger, entry)) or UNBATCHED
    if not one.ack_set:
        return [(ledger, entry, index, end_of_id(borders, one.entry_id) - 1)]
    found = decode_ack_set(one.ack_set, end_of_batch(borders, index) - index)
    return [(ledger, entry, index + first, index + last) for first, last in found]


def _is_batch_of_one(entry: Entry, index: int) -> bool:
    """True if the message was sent as a batch all the same."""
    batch = DecodedBatch(entry.batch(entry.batch_of(index)), 0, verify=False)
    return EXT_BATCH_OF_ONE in batch.extensions
