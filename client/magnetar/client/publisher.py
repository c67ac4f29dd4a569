"""The side of a producer that faces the broker: epochs, writing, receipts, failures, expiry.

A closed group is kept encoded until it settles; after a reconnect everything that is not confirmed is sent again, in order,
under a new epoch (CORRECTNESS.md rule 33).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from magnetar.proto.commands import RECEIPT_ROW, CloseProducer, CreateProducer, Send, SendFailed, decode_rows
from magnetar.proto.commands import Receipt as ReceiptCommand
from magnetar.proto.compression import Compression
from magnetar.proto.errors import Action, FinalError, MagnetarError, ProducerFenced, error_from_wire

from .attachment import Attachment
from .columns import Columns
from .encoding import encode_group
from .options import ProducerOptions
from .outbox import Outbox
from .receipts import Group

if TYPE_CHECKING:
    from .client import Client
    from .link import Link

log = logging.getLogger("magnetar.client")


class Publisher:
    """Base of Producer, which adds what users call and the open batch."""

    def __init__(self, client: Client, topic: str, options: ProducerOptions, producer_id: int) -> None:
        self._client = client
        self._topic = topic
        self._options = options
        self._id = producer_id
        self._name = options.name
        self._epoch = -1
        self._loop = asyncio.get_running_loop()
        self._compression = Compression.parse(options.compression)
        self._outbox = Outbox()
        self._attachment = Attachment(client, topic, self, f"producer of {topic}")
        self._link: Link | None = None
        self._receipts_from: Link | None = None  # where receipts of the current epoch come from, if they can
        self._send_header = b""
        self._receipt_header = b""
        self._next_sequence_id = 0
        self._max_message_bytes = client.options.max_message_bytes
        self._failure: MagnetarError | None = None  # why nothing can be sent any more
        self._unreported: Group | None = (
            None  # the first that failed, for flush to tell unless somebody was told
        )
        self._expiry: asyncio.TimerHandle | None = None
        self._room = (
            asyncio.Event()
        )  # set when pending bytes fall, and when there is nothing to wait for any more

    @property
    def topic(self) -> str:
        """Full name of the topic."""
        return self._topic

    @property
    def name(self) -> str:
        """Name of the producer, given by the service unless chosen."""
        return self._name or ""

    def _close_batch(self) -> None:
        """Closes the open batch, if there is one."""
        raise NotImplementedError

    def _close_group(self, group: Group, columns: Columns, size: int) -> None:
        options = self._options
        group.message_count = len(columns.values)
        try:
            group.encoded = encode_group(
                columns,
                group.first_sequence_id,
                self._client.clock.now_ms(),
                batching=options.batching,
                compression=self._compression,
            )
        except Exception as error:
            # Every argument was checked at its call; what is left is, for example, a codec that is not installed.
            group.fail(FinalError(f"{group.message_count} messages cannot be encoded: {error!r}"))
            self._note_failed(group)
            return
        group.bytes = size
        group.deadline = self._loop.time() + options.send_timeout
        self._next_sequence_id = group.first_sequence_id + group.message_count
        self._outbox.add(group)
        if self._expiry is None:
            self._expiry = self._loop.call_at(group.deadline, self._expire)
        self._write()

    # --- the connection ----------------------------------------------------------------------------------------------

    async def attach(self, link: Link) -> None:
        """Creates the producer at the broker under a new epoch and sends what is not confirmed (Attachment calls it)."""
        epoch = self._epoch + 1
        link.producers[self._id] = self
        try:
            result = await link.request(
                CreateProducer(0, self._id, self._topic, self._name, epoch),
                self._client.options.operation_timeout,
            )
        except BaseException as error:
            link.producers.pop(self._id, None)
            if not isinstance(error, MagnetarError) or error.retryable:
                # Given up, perhaps, before the broker was done: it must not keep the place for nobody.
                link.send(CloseProducer(0, self._id).encode())
            raise
        self._name = result["name"]
        first = self._epoch < 0
        self._epoch = int(result["epoch"])
        if first:
            self._next_sequence_id = int(result.get("last_sequence_id", -1)) + 1
        self._max_message_bytes = min(self._client.options.max_message_bytes, link.max_message_bytes)
        self._stop_receipts()
        self._send_header = Send(0, self._id, self._epoch).encode()
        self._receipt_header = ReceiptCommand(0, self._id, self._epoch).encode()
        self._link = self._receipts_from = link
        link.routes[self._receipt_header] = self._receipts
        self._outbox.rewind()
        self._write()

    def moved(self, error: MagnetarError) -> None:
        """The connection broke or the topic moves (Link calls it)."""
        self._attachment.lost(error)

    def detached(self) -> None:
        """Nothing more is written; Attachment goes on trying. Receipts of what was written may still come, if it was not
        the connection that broke: the broker opens the next epoch when they all have."""
        link, self._link = self._link, None
        if link is not None:
            link.producers.pop(self._id, None)

    def _stop_receipts(self) -> None:
        link, self._receipts_from = self._receipts_from, None
        if link is not None:
            link.routes.pop(self._receipt_header, None)

    def gave_up(self, error: MagnetarError) -> None:
        """The topic cannot be produced to any more."""
        self._stop_receipts()
        self._failure = error
        self._close_batch()
        self._fail_all(error)

    def _write(self) -> None:
        link = self._link
        if link is None:
            return
        outbox, header = self._outbox, self._send_header
        while outbox.unsent and link.writable:
            group = outbox.next_unsent()
            assert group.encoded is not None
            link.send_encoded(group.encoded.frames(header, group.confirmed))

    def writing_resumed(self) -> None:
        """The connection takes more."""
        self._write()

    def _receipts(self, payloads: list[bytes]) -> None:
        outbox = self._outbox
        for payload in payloads:
            outbox.confirm(decode_rows(RECEIPT_ROW, payload))
        self._room.set()
        if not outbox:
            self._close_batch()

    def send_failed(self, command: SendFailed) -> None:
        """The broker did not store a group and those after it in this epoch."""
        if command.epoch != self._epoch or self._link is None:
            return
        error = error_from_wire(command.code, command.action, command.message)
        if isinstance(error, ProducerFenced):
            self._attachment.give_up(error)
            return
        if error.action in (Action.FIX_CALL, Action.GIVE_UP):
            group = self._outbox.fail_group_with(command.sequence_id, error)
            if group is not None:
                self._note_failed(group)
        # What came after it was not stored either: it goes again, under a new epoch.
        self._attachment.lost(error)

    # --- failures ----------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        self._expiry = None
        for group in self._outbox.expire(self._loop.time(), self._options.send_timeout):
            self._note_failed(group)
        first = self._outbox.first
        if first is not None:
            self._expiry = self._loop.call_at(first.deadline, self._expire)

    def _fail_all(self, error: MagnetarError) -> None:
        for group in self._outbox.fail_all(error):
            self._note_failed(group)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._room.set()

    def _note_failed(self, group: Group) -> None:
        log.warning(
            "%d messages to %s failed: %s", group.message_count - group.confirmed, self._topic, group.error
        )
        if self._unreported is None or self._unreported.error_seen:
            self._unreported = group
        self._room.set()
