"""`magnetar produce`: a line is a message, or a file is one."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

import typer

from magnetar.proto.compression import Compression
from magnetar.proto.errors import InvalidArgument, MessageTooLarge, StorageFailed
from magnetar.runtime.quantities import counted

from ..terminal.command import Answer, command
from ..terminal.options import DEFAULT_URL, MessageCompression, Topic, Url
from ..terminal.progress import ProgressMeter
from ..terminal.session import connected, exclusive, fail, named_values, parsed, utf8
from .lines import open_input, read_lines, read_whole

if TYPE_CHECKING:
    from magnetar.client import MessageId, Producer, Receipt

MAX_UNCONFIRMED_GROUPS = 64

produce_app = typer.Typer()


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
        from magnetar.client import ProducerQueueFull

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


async def _groups(
    file: str | None, texts: list[str], payload: str | None
) -> tuple[AsyncIterator[list[bytes]], str, int | None]:
    """Groups of values, what errors call a value, and how many there are, if that is known.

    A file that cannot be read is found here, before anything connects.
    """
    from magnetar.client.options import DEFAULT_MAX_MESSAGE_BYTES

    async def once(*values: bytes) -> AsyncIterator[list[bytes]]:
        yield list(values)

    if payload is not None:
        return once(await read_whole(open_input(payload), DEFAULT_MAX_MESSAGE_BYTES)), "message", 1
    if texts:
        return once(*map(os.fsencode, texts)), "message", len(texts)
    return read_lines(open_input("-" if file is None else file)), "line", None


@command(produce_app, "produce", "Messages", warnings=True)
async def produce(
    topic: Topic,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", help="Send each line of this file; - is standard input.", metavar="F"),
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option("-m", "--message", help="Send this text; may be repeated.", metavar="TEXT"),
    ] = None,
    payload: Annotated[
        str | None,
        typer.Option(
            "--payload", help="Send this whole file as one message; - is standard input.", metavar="F"
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="The key of every message.", metavar="TEXT")
    ] = None,
    key_field: Annotated[
        str | None,
        typer.Option("--key-field", help="Lines are JSON objects; this field is the key.", metavar="K"),
    ] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "--property", help="A property of every message; may be repeated.", metavar="NAME=VALUE"
        ),
    ] = None,
    event_time: Annotated[
        str | None,
        typer.Option(
            "--event-time",
            help="The event time of every message: 2026-01-31T12:00:00 is local time, "
            "2026-01-31T12:00:00Z and +02:00 name a zone.",
            metavar="TIME",
        ),
    ] = None,
    compression: MessageCompression = "none",
    url: Url = DEFAULT_URL,
    as_json: bool = False,
) -> None:
    """Send messages: every line of standard input or of a file, every -m, or a whole file is one."""
    from magnetar.client.options import parse_time

    exclusive({"--file": file, "-m": texts, "--payload": payload})
    exclusive({"--key": key, "--key-field": key_field})
    exclusive({"--payload": payload, "--key-field": key_field})
    parsed("--compression", Compression.parse, compression)
    attributes = Attributes(
        properties=named_values("--property", properties or (), "origin=ACE") or None,
        event_time=None if event_time is None else parsed("--event-time", parse_time, event_time),
    )
    key = None if key is None else parsed("--key", utf8, key)
    source, noun, total = await _groups(file, texts or [], payload)
    watch = ProgressMeter("producing", total=total)
    async with (
        connected(url) as client,
        client.create_producer(topic, compression=cast(Any, compression)) as producer,
    ):
        sender = Sender(producer, noun, key, key_field, attributes, watch)
        try:
            with watch:
                async for values in source:
                    await sender.send(values)
                await sender.finish()
        except asyncio.CancelledError:
            await sender.finish()  # what was read before is stored
            _stored(topic, sender).print(as_json=as_json)
            raise
        except (InvalidArgument, MessageTooLarge, StorageFailed) as error:
            await sender.finish()
            fail(f"{error.message} (messages stored before it: {sender.confirmed:,})")
    _stored(topic, sender).print(as_json=as_json)


def _stored(topic: str, sender: Sender) -> Answer:
    last = sender.last_id and str(sender.last_id)
    stored = f"stored {counted(sender.confirmed, 'message')} in {topic}"
    return Answer(
        {"topic": topic, "messages": sender.confirmed, "last_id": last},
        [f"{stored} (last id {last})" if last else stored],
    )
