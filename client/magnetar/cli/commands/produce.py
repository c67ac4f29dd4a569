"""`magnetar produce`: a line is a message, or a file is one."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, TypedDict

from magnetar.client import MessageId, Producer, ProducerQueueFull, Receipt, connect
from magnetar.client.options import ClientOptions
from magnetar.proto.errors import InvalidArgument, MessageTooLarge, StorageFailed

from ..terminal.progress import ProgressMeter
from ..terminal.session import fail, print_json
from .lines import open_input, read_lines, read_whole

MAX_UNCONFIRMED_GROUPS = 64


class Attributes(TypedDict):
    """What every message of the command has in common; event_time in milliseconds since the epoch."""

    properties: dict[str, str] | None
    event_time: int | None


class Sender:
    """Sends groups of messages in order, with a bounded number of groups unconfirmed."""

    def __init__(
        self,
        producer: Producer,
        noun: str,
        key: str | None,
        key_field: str | None,
        attributes: Attributes,
        watch: ProgressMeter,
    ) -> None:
        """`noun`: what errors call a message, "line" or "message"."""
        self._producer = producer
        self._noun = noun
        self._fixed_key = key
        self._key_field = key_field
        self._attributes = attributes
        self._watch = watch
        self._number = 0
        self._unconfirmed: deque[list[Receipt]] = deque()
        self.confirmed = 0
        self.last_id: MessageId | None = None

    async def send(self, values: list[bytes]) -> None:
        """Returns when the messages are queued; waits for older ones when too many are unconfirmed."""
        receipts: list[Receipt] = []
        try:
            for value in values:
                self._number += 1
                key = self._fixed_key if self._key_field is None else self._key(value)
                while True:
                    try:
                        receipts.append(self._producer.send_nowait(value, key=key, **self._attributes))
                        break
                    except ProducerQueueFull:
                        if receipts:
                            self._unconfirmed.append(receipts)
                            receipts = []
                        if not self._unconfirmed:
                            raise
                        await self._confirm_oldest()
        except (InvalidArgument, MessageTooLarge) as error:
            raise type(error)(f"{self._noun} {self._number}: {error.message}") from None
        finally:
            self._unconfirmed.append(receipts)
        while len(self._unconfirmed) > MAX_UNCONFIRMED_GROUPS:
            await self._confirm_oldest()

    async def finish(self) -> None:
        """Waits until everything is confirmed."""
        while self._unconfirmed:
            await self._confirm_oldest()

    async def _confirm_oldest(self) -> None:
        receipts = self._unconfirmed[0]
        for receipt in receipts:
            self.last_id = await receipt
        # Only now: `finish` counts what Ctrl-C interrupted here.
        self._unconfirmed.popleft()
        self.confirmed += len(receipts)
        self._watch.advance(len(receipts))

    def _key(self, value: bytes) -> str:
        try:
            found: Any = json.loads(value)[self._key_field]
        except (ValueError, KeyError, TypeError):
            raise InvalidArgument(
                f"it is no JSON object with a field {self._key_field!r}; leave out --key-field, or correct it"
            ) from None
        return found if isinstance(found, str) else json.dumps(found)


async def _once(values: list[bytes]) -> AsyncIterator[list[bytes]]:
    yield values


async def produce(
    url: str,
    topic: str,
    *,
    file: str | None,
    texts: list[str],
    payload: str | None,
    key: str | None,
    key_field: str | None,
    attributes: Attributes,
    compression: str,
    as_json: bool,
) -> None:
    """Sends the payload as one message, or every text, or every line of the file or of standard input.

    Prints what was stored, also on Ctrl-C. An unreadable file is found before anything connects.
    """
    noun, total = "message", len(texts)
    if payload is not None:
        source = _once([await read_whole(open_input(payload), ClientOptions().max_message_bytes)])
        total = 1
    elif texts:
        source = _once([os.fsencode(text) for text in texts])
    else:
        noun, source = "line", read_lines(open_input("-" if file is None else file))
    watch = ProgressMeter("producing", total=total or None)
    async with connect(url) as client, client.create_producer(topic, compression=compression) as producer:
        sender = Sender(producer, noun, key, key_field, attributes, watch)
        try:
            with watch:
                async for values in source:
                    await sender.send(values)
                await sender.finish()
        except asyncio.CancelledError:
            await sender.finish()  # what was read before is stored
            _report(topic, sender, as_json=as_json)
            raise
        except (InvalidArgument, MessageTooLarge, StorageFailed) as error:
            await sender.finish()
            fail(f"{error.message} (messages stored before it: {sender.confirmed:,})")
    _report(topic, sender, as_json=as_json)


def _report(topic: str, sender: Sender, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {"topic": topic, "messages": sender.confirmed, "last_id": sender.last_id and str(sender.last_id)}
        )
    else:
        last = f" (last id {sender.last_id})" if sender.last_id else ""
        print(f"stored {sender.confirmed:,} message{'' if sender.confirmed == 1 else 's'} in {topic}{last}")
