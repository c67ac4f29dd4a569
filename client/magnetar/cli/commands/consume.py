"""`magnetar consume` and `magnetar tail`: messages on standard output, a line each."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from magnetar.client import (
    AlreadyClosed,
    Client,
    Consumer,
    InvalidArgument,
    MagnetarError,
    Message,
    Reader,
    ReceiveTimeout,
    TopicNotFound,
    connect,
)
from magnetar.client.options import Start

from .templates import Template

FLUSH_MESSAGES = 1000
LOOK_AGAIN_S = 0.5  # whether a subscription that others consume as well is empty
# What `--format line` shows of a value: a file of megabytes must not flood the terminal.
SHOWN_BYTES = 16 * 1024

Encode = Callable[[Message], bytes]


def as_plain(message: Message) -> bytes:
    """The value as it is."""
    return message.value or b""


def as_json(message: Message) -> bytes:
    """As `as_record`."""
    return json.dumps(as_record(message), ensure_ascii=False).encode()


def as_record(message: Message) -> dict[str, Any]:
    """A message as `--json` prints it; a value that is not UTF-8 is in "value_base64"."""
    key, value = message.key, message.value
    record: dict[str, Any] = {
        "id": str(message.id),
        "key": key.decode(errors="replace") if isinstance(key, bytes) else key,
    }
    try:
        record["value"] = None if value is None else value.decode()
    except UnicodeDecodeError:
        record["value_base64"] = base64.b64encode(value or b"").decode()
    record["properties"] = dict(message.properties)
    record["publish_time"] = message.publish_time
    record["event_time"] = message.event_time
    record["redelivery_count"] = message.redelivery_count
    record["topic"] = message.topic
    return record


def as_line(message: Message, *, dim: bool = False) -> bytes:
    """For people: id, publish time (local), key and properties if there are any, value. `dim`: all but the value is grey.

    Control characters and bytes that are not text are shown as escapes: `\\x1b`, `\\n`, `\\xff`.
    """
    fields = [str(message.id), _local_time(message.publish_time)]
    if message.key is not None:
        fields.append(f"key={printable(message.key)}")
    if message.properties:
        pairs = ", ".join(f"{printable(k)}={printable(v)}" for k, v in message.properties.items())
        fields.append(f"{{{pairs}}}")
    head, value = "  ".join(fields), message.value
    if value is None:
        shown, note = "", "(no value)"
    elif len(value) > SHOWN_BYTES:
        shown, note = (
            printable(value[:SHOWN_BYTES]),
            f"... ({len(value):,} bytes; --format plain writes all)",
        )
    else:
        shown, note = printable(value), "" if value else "(empty)"
    if dim:
        head, note = f"\x1b[2m{head}\x1b[0m", note and f"\x1b[2m{note}\x1b[0m"
    return f"{head}  {shown}{note}".encode()


def _local_time(ms: int) -> str:
    try:
        when = datetime.fromtimestamp(ms / 1000, UTC).astimezone()
    except (ValueError, OverflowError, OSError):  # a producer's clock may be wrong by any amount
        return f"{ms} ms"
    return when.replace(tzinfo=None).isoformat(" ", "milliseconds")


def printable(data: bytes | str) -> str:
    """Text that no terminal takes for a command: control characters and bytes that are not text become escapes."""
    text = data.decode(errors="backslashreplace") if isinstance(data, bytes) else data
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def encoder(format: str | None) -> Encode:
    """What makes a line of a message. None: for people on a terminal, else the plain value. Raises InvalidArgument."""
    terminal = sys.stdout.isatty()
    if format not in (None, "plain", "line", "json"):
        if "{" not in format:
            raise InvalidArgument(
                f"{format!r} is neither plain, line or json nor a template with fields in braces, as '{{key}} {{value}}'"
            )
        template = Template(format)
        return lambda message: template.encode(message, printable if terminal else None)
    if format is None:
        format = "line" if terminal else "plain"
    if format == "line":
        dim = terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        return lambda message: as_line(message, dim=dim)
    return as_json if format == "json" else as_plain


class Printer:
    """Prints messages and acknowledges them once standard output has them."""

    def __init__(self, consumer: Consumer, encode: Encode) -> None:
        self._consumer = consumer
        self._encode = encode
        # Written to the buffer of standard output; at most FLUSH_MESSAGES.
        self._printed: list[Message] = []

    async def print(self, message: Message) -> None:
        """One message."""
        sys.stdout.buffer.write(self._encode(message) + b"\n")
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


def topics_of(topics: list[str], *, pattern: bool) -> list[str] | re.Pattern[str]:
    """What `subscribe` takes. Raises InvalidArgument."""
    if not pattern:
        return topics
    if len(topics) != 1:
        raise InvalidArgument(f"--pattern takes one regular expression, not {len(topics)}: join them with |")
    try:
        return re.compile(topics[0])
    except re.error as error:
        raise InvalidArgument(f"not a regular expression: {topics[0]!r} ({error})") from None


async def consume(
    url: str,
    topics: list[str] | re.Pattern[str],
    subscription: str,
    *,
    kind: str,
    count: int | None,
    start: Start,
    timeout: float | None,
    follow: bool,
    encode: Encode,
) -> None:
    """Prints and acknowledges `count` messages, without a count all that come.

    Until interrupted, until none came for `timeout` seconds, or (not `follow`) until the subscription has no backlog; then
    a topic that does not exist is an error. SIGTERM ends it, and the process, once what was printed is acknowledged.
    """
    terminated = False
    async with connect(url) as client, contextlib.AsyncExitStack() as stack:
        new = (
            []
            if isinstance(topics, re.Pattern)
            else await _without(client, topics, subscription, follow=follow)
        )
        consumer = await stack.enter_async_context(
            client.subscribe(topics, subscription, type=kind, start=start)
        )
        for topic in new:
            print(
                f"magnetar: subscription {subscription} of {topic} is new; messages are kept for it until it is deleted "
                "(magnetar subscriptions delete)",
                file=sys.stderr,
                flush=True,
            )
        if sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _stop, consumer)
        printer = Printer(consumer, encode)
        seen = 0
        try:
            while count is None or seen < count:
                message = await _next(client, consumer, printer, timeout, follow=follow)
                if message is None:
                    break
                await printer.print(message)
                seen += 1
        except AlreadyClosed:
            terminated = True
        finally:
            await printer.flush(receipt=True)
    if terminated:
        os.kill(os.getpid(), signal.SIGTERM)  # so that whoever sent it sees that the process ended by it


def _stop(consumer: Consumer) -> None:
    """On SIGTERM; the next one ends the process at once."""
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    consumer.stop()


async def _without(client: Client, topics: list[str], subscription: str, *, follow: bool) -> list[str]:
    """Those without this subscription. Raises TopicNotFound unless it may `follow` a topic from its beginning."""
    found: list[str] = []
    for topic in topics:
        try:
            if subscription in (await client.admin.topic_stats(topic))["subscriptions"]:
                continue
        except MagnetarError as error:
            if not follow:
                raise
            if not isinstance(error, TopicNotFound):
                continue  # what is not known is not said: subscribing tells what is wrong
        found.append(topic)
    return found


async def _next(
    client: Client, consumer: Consumer, printer: Printer, timeout: float | None, *, follow: bool
) -> Message | None:
    """None: nothing more is to be printed."""
    with contextlib.suppress(ReceiveTimeout):
        return await consumer.receive(timeout=0)
    await printer.flush(receipt=not follow)
    loop = asyncio.get_running_loop()
    deadline = math.inf if timeout is None else loop.time() + timeout
    while follow or not await _is_empty(client, consumer):
        patience = deadline - loop.time() if follow else min(deadline - loop.time(), LOOK_AGAIN_S)
        try:
            return await consumer.receive(timeout=None if patience == math.inf else max(patience, 0))
        except ReceiveTimeout:
            if loop.time() >= deadline:
                break
    return None


async def _is_empty(client: Client, consumer: Consumer) -> bool:
    """True if everything that is stored now is acknowledged."""
    for topic in consumer.topics:
        with contextlib.suppress(TopicNotFound):  # deleted in the meantime
            found = (await client.admin.topic_stats(topic))["subscriptions"].get(consumer.subscription)
            if found is not None and found["backlog_messages"]:
                return False
    return True


async def peek(url: str, topic: str, subscription: str, count: int, encode: Encode) -> None:
    """Prints the next messages of a subscription, which stay where they are."""
    async with connect(url) as client:
        for message in await client.admin.peek_messages(topic, subscription, count):
            sys.stdout.buffer.write(encode(message) + b"\n")
    sys.stdout.buffer.flush()


async def tail(
    url: str, topic: str, *, count: int | None, start: Start, timeout: float | None, encode: Encode
) -> None:
    """Prints messages without a subscription."""
    async with connect(url) as client, client.create_reader(topic, start=start) as reader:
        try:
            await _tail(reader, count, timeout, encode)
        finally:
            sys.stdout.buffer.flush()


async def _tail(reader: Reader, count: int | None, timeout: float | None, encode: Encode) -> None:
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
        sys.stdout.buffer.write(encode(message) + b"\n")
        seen += 1
