"""`magnetar consume` and `magnetar tail`: messages on standard output, a line each."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

from magnetar.client import Consumer, Message, Reader, ReceiveTimeout, connect

from .session import parse_start

FLUSH_MESSAGES = 1000


def as_record(message: Message) -> dict[str, Any]:
    """A message as `--json` prints it; a value that is not UTF-8 stands in "value_base64"."""
    record: dict[str, Any] = {"id": str(message.id), "key": message.key}
    value = message.value
    try:
        record["value"] = None if value is None else value.decode()
    except UnicodeDecodeError:
        record["value_base64"] = base64.b64encode(value or b"").decode()
    record["properties"] = dict(message.properties)
    for name in ("publish_time", "event_time"):
        when = getattr(message, name)
        record[name] = when.isoformat() if hasattr(when, "isoformat") else when
    record["redelivery_count"] = message.redelivery_count
    record["topic"] = message.topic
    if isinstance(record["key"], bytes):
        record["key"] = record["key"].decode(errors="replace")
    return record


def write(message: Message, as_json: bool) -> None:
    """One line, not flushed."""
    if as_json:
        line = json.dumps(as_record(message), ensure_ascii=False).encode()
    else:
        line = message.value or b""
    sys.stdout.buffer.write(line + b"\n")


class Printer:
    """Prints messages and acknowledges them once standard output has them."""

    def __init__(self, consumer: Consumer, as_json: bool) -> None:
        self._consumer = consumer
        self._as_json = as_json
        # Written to the buffer of standard output; at most FLUSH_MESSAGES.
        self._printed: list[Message] = []

    async def print(self, message: Message) -> None:
        """One message."""
        write(message, self._as_json)
        self._printed.append(message)
        if len(self._printed) >= FLUSH_MESSAGES:
            await self.flush()

    async def flush(self, *, receipt: bool = False) -> None:
        """With `receipt` the acknowledgements are durable when it returns."""
        sys.stdout.buffer.flush()
        printed, self._printed = self._printed, []
        for message in printed[: -1 if receipt else None]:
            await self._consumer.ack(message)
        if receipt and printed:
            await self._consumer.ack(printed[-1], receipt=True)


async def consume(
    url: str,
    topic: str,
    subscription: str,
    *,
    kind: str,
    count: int | None,
    start: str,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Prints and acknowledges `count` messages (None: until interrupted, or until none came for `timeout` seconds)."""
    async with (
        connect(url) as client,
        client.subscribe(topic, subscription, type=kind, start=parse_start(start)) as consumer,
    ):
        printer = Printer(consumer, as_json)
        seen = 0
        try:
            while count is None or seen < count:
                try:
                    message = await consumer.receive(timeout=0)
                except ReceiveTimeout:
                    await printer.flush()
                    message = await consumer.receive(timeout=timeout)
                await printer.print(message)
                seen += 1
        except ReceiveTimeout:
            pass
        finally:
            await printer.flush(receipt=True)


async def tail(
    url: str, topic: str, *, count: int | None, start: str, timeout: float | None, as_json: bool
) -> None:
    """Prints messages without a subscription."""
    async with connect(url) as client, client.create_reader(topic, start=parse_start(start)) as reader:
        try:
            await _tail(reader, count, timeout, as_json)
        finally:
            sys.stdout.buffer.flush()


async def _tail(reader: Reader, count: int | None, timeout: float | None, as_json: bool) -> None:
    seen = 0
    while count is None or seen < count:
        try:
            message = await reader.read_next(timeout=0)
        except ReceiveTimeout:
            sys.stdout.buffer.flush()
            try:
                message = await reader.read_next(timeout=timeout)
            except ReceiveTimeout:
                return
        write(message, as_json)
        seen += 1
