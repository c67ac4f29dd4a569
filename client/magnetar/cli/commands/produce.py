"""`magnetar produce`: a line is a message, or a file is one."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from magnetar.proto.compression import Compression
from magnetar.proto.errors import InvalidArgument, MessageTooLarge, SequenceIdError, StorageFailed
from magnetar.proto.ids import NO_PARTITION, TopicName
from magnetar.proto.message_rules import checked_sequence_id, checked_time_ms
from magnetar.runtime.quantities import counted

from ..terminal.command import Answer, command
from ..terminal.options import DEFAULT_URL, MessageCompression, Topic, Url
from ..terminal.progress import ProgressMeter
from ..terminal.session import (
    EXIT_USAGE,
    connected,
    exclusive,
    fail,
    milliseconds,
    named_values,
    parsed,
    say,
    utf8,
)
from .lines import open_input, read_lines, read_whole

if TYPE_CHECKING:
    from magnetar.client import Client, MessageId, Producer, Receipt

MAX_UNCONFIRMED_GROUPS = 64

_TIMES = "2026-01-31T12:00:00 is local time, 2026-01-31T12:00:00Z and +02:00 name a zone"

produce_app = typer.Typer()


def _time_of(found: Any) -> int | None:
    from magnetar.client.options import parse_time

    return parse_time(found) if isinstance(found, str) else found and checked_time_ms(found)


# An attribute of a message, the option that names a field for it, and how what the field has becomes the attribute.
FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "key": ("--key-field", lambda found: found if isinstance(found, str) else json.dumps(found)),
    "sequence_id": ("--sequence-field", checked_sequence_id),
    "deliver_at": ("--deliver-at-field", _time_of),
}


class Sender:
    """Sends groups of messages in order, with a bounded number of groups unconfirmed.

    `noun`: what errors call a message, "line" or "message". attributes: what all messages have in common, as arguments of
    `send_nowait`. fields: which field of a message, which is a JSON object, has which of FIELDS. confirmed: how many are
    stored; duplicates: how many were stored before.
    """

    def __init__(
        self,
        producer: Producer,
        noun: str,
        attributes: dict[str, Any],
        fields: dict[str, str],
        watch: ProgressMeter,
    ) -> None:
        self._producer = producer
        self._noun = noun
        self._attributes = attributes
        self._fields = fields
        self._watch = watch
        self._number = 0
        self._unconfirmed: deque[list[Receipt]] = deque()
        self.confirmed = self.duplicates = 0
        self.last_id: MessageId | None = None

    async def send(self, values: list[bytes]) -> None:
        """Returns when the messages are queued; waits for older ones when too many are unconfirmed."""
        from magnetar.client import ProducerQueueFull

        receipts: list[Receipt] = []
        try:
            for value in values:
                self._number += 1
                attributes = (
                    {**self._attributes, **self._of_fields(value)} if self._fields else self._attributes
                )
                while True:
                    try:
                        receipts.append(self._producer.send_nowait(value, **attributes))
                        break
                    except ProducerQueueFull:
                        if receipts:
                            self._unconfirmed.append(receipts)
                            receipts = []
                        if not self._unconfirmed:
                            raise
                        await self._confirm_oldest()
        except (InvalidArgument, MessageTooLarge, SequenceIdError) as error:
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
        ids = [await receipt for receipt in receipts]
        # Only now: `finish` counts what Ctrl-C interrupted here.
        self._unconfirmed.popleft()
        stored = [one for one in ids if not one.is_duplicate]
        self.last_id = stored[-1] if stored else self.last_id
        self.confirmed += len(stored)
        self.duplicates += len(ids) - len(stored)
        self._watch.advance(len(receipts))

    def _of_fields(self, value: bytes) -> dict[str, Any]:
        try:
            line: Any = json.loads(value)
        except ValueError:
            line = None
        found: dict[str, Any] = {}
        for name, field in self._fields.items():
            option, read = FIELDS[name]
            if not isinstance(line, dict) or field not in line:
                raise InvalidArgument(
                    f"it is no JSON object with a field {field!r}; leave out {option}, or correct it"
                )
            try:
                found[name] = read(line[field])
            except InvalidArgument as error:
                raise InvalidArgument(f"its field {field!r}: {error.message}") from None
        return found


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
        typer.Option("--event-time", help=f"The event time of every message: {_TIMES}.", metavar="TIME"),
    ] = None,
    deliver_at: Annotated[
        str | None,
        typer.Option("--deliver-at", help="When consumers get them, a time as --event-time.", metavar="TIME"),
    ] = None,
    deliver_after: Annotated[
        str | None,
        typer.Option("--deliver-after", help="The same, from now on: 90s, 2h, 7d.", metavar="DURATION"),
    ] = None,
    deliver_at_field: Annotated[
        str | None,
        typer.Option(
            "--deliver-at-field",
            help="Lines are JSON objects; this field says when, as a time or milliseconds. null: at once.",
            metavar="K",
        ),
    ] = None,
    sequence_field: Annotated[
        str | None,
        typer.Option(
            "--sequence-field",
            help="Lines are JSON objects; this field is the sequence id, which rises. With --name, on a topic with "
            "deduplication, sending a file again stores nothing twice.",
            metavar="K",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The name of the producer.", metavar="NAME")
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option("--partition", help="Send to this partition of the topic.", min=0, metavar="N"),
    ] = None,
    access_mode: Annotated[
        str,
        typer.Option(
            "--access-mode",
            help="Who else may produce: shared, exclusive, wait_for_exclusive, exclusive_with_fencing.",
            metavar="MODE",
        ),
    ] = "shared",
    compression: MessageCompression = "none",
    url: Url = DEFAULT_URL,
    as_json: bool = False,
) -> None:
    """Send messages: every line of standard input or of a file, every -m, or a whole file is one."""
    from magnetar.client.options import ProducerOptions

    exclusive({"--file": file, "-m": texts, "--payload": payload})
    exclusive({"--key": key, "--key-field": key_field})
    due = {
        "--deliver-at": deliver_at,
        "--deliver-after": deliver_after,
        "--deliver-at-field": deliver_at_field,
    }
    exclusive(due)
    fields = {
        attribute: field
        for attribute, field in zip(FIELDS, (key_field, sequence_field, deliver_at_field))
        if field is not None
    }
    for attribute in fields:
        exclusive({"--payload": payload, FIELDS[attribute][0]: True})
    if sequence_field is not None and name is None:
        fail(
            "--sequence-field needs --name: what is stored already is known by the producer's name",
            EXIT_USAGE,
        )
    parsed("--compression", Compression.parse, compression)
    parsed("--access-mode", lambda mode: ProducerOptions(topic, access_mode=mode), cast(Any, access_mode))
    attributes = _attributes(key, properties or (), event_time, deliver_at, deliver_after)
    if partition is not None:
        parsed_name = TopicName.parse(topic)
        if parsed_name.partition != NO_PARTITION:
            fail(f"{topic} is a partition: leave out --partition, or name the topic as a whole", EXIT_USAGE)
        topic = str(parsed_name.partition_of(partition))
    source, noun, total = await _groups(file, texts or [], payload)
    watch = ProgressMeter("producing", total=total)
    options: Any = {"name": name, "compression": compression, "access_mode": access_mode}
    async with connected(url) as client, client.create_producer(topic, **options) as producer:
        if sequence_field is not None:
            await _look_for_deduplication(client, topic)
        sender = Sender(producer, noun, attributes, fields, watch)
        try:
            with watch:
                async for values in source:
                    await sender.send(values)
                await sender.finish()
        except asyncio.CancelledError:
            await sender.finish()  # what was read before is stored
            _stored(topic, sender).print(as_json=as_json)
            raise
        except (InvalidArgument, MessageTooLarge, SequenceIdError, StorageFailed) as error:
            await sender.finish()
            fail(f"{error.message} (messages stored before it: {sender.confirmed:,})")
    _stored(topic, sender).print(as_json=as_json)


async def _look_for_deduplication(client: Client, topic: str) -> None:
    found = await client.admin.topic_policies(topic)
    if not any(row.policy == "deduplication" and row.value for row in found.in_force):
        say(
            f"{topic} has no deduplication: what is sent again is stored again; magnetar topics policies {topic} "
            "--deduplication on, before the first message"
        )


def _attributes(
    key: str | None,
    properties: Sequence[str],
    event_time: str | None,
    deliver_at: str | None,
    deliver_after: str | None,
) -> dict[str, Any]:
    """What every message has, as arguments of `send_nowait`."""
    from magnetar.client.options import parse_time

    def time_of(option: str, text: str | None) -> int | None:
        return None if text is None else parsed(option, parse_time, text)

    due_ms = time_of("--deliver-at", deliver_at)
    if deliver_after is not None:
        due_ms = round(time.time() * 1000) + milliseconds("--deliver-after", deliver_after)
    return {
        "key": None if key is None else parsed("--key", utf8, key),
        "properties": named_values("--property", properties, "origin=ACE") or None,
        "event_time": time_of("--event-time", event_time),
        "deliver_at": due_ms,
    }


def _stored(topic: str, sender: Sender) -> Answer:
    last = sender.last_id and str(sender.last_id)
    stored = f"stored {counted(sender.confirmed, 'message')} in {topic}" + (
        f" (last id {last})" if last else ""
    )
    before = f"; {counted(sender.duplicates, 'message')} stored before" if sender.duplicates else ""
    return Answer(
        {
            "topic": topic,
            "messages": sender.confirmed,
            "last_id": last,
            "duplicates": sender.duplicates,
        },
        [stored + before],
    )
