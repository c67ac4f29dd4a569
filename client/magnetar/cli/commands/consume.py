"""`magnetar consume` and `magnetar tail`: messages on standard output, a line each."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import sys
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from magnetar.proto.errors import InvalidArgument, MagnetarError, TopicNotFound

from ..terminal.command import command
from ..terminal.options import DEFAULT_URL, Begin, Count, Kind, Timeout, Topic, Url
from ..terminal.session import connected, parsed, say
from .formats import Format, chosen

if TYPE_CHECKING:
    from magnetar.client import Client, Consumer, Message, Reader

    from .formats import Encode

FLUSH_MESSAGES = 1000
LOOK_AGAIN_S = 0.5  # whether a subscription that others consume as well is empty

consume_app = typer.Typer()


class Printer:
    """Prints messages and acknowledges them once standard output has them."""

    def __init__(self, consumer: Consumer, encode: Encode) -> None:
        self._consumer = consumer
        self._encode = encode
        # Written to the buffer of standard output and not acknowledged; at most FLUSH_MESSAGES.
        self._printed: deque[Message] = deque()

    async def print(self, message: Message) -> None:
        """One message."""
        sys.stdout.buffer.write(self._encode(message) + b"\n")
        self._printed.append(message)
        if len(self._printed) >= FLUSH_MESSAGES:
            await self.flush()

    async def flush(self, *, receipt: bool = False) -> None:
        """With `receipt` the acknowledgements are durable when it returns. One that is cancelled can be done again."""
        sys.stdout.buffer.flush()
        while self._printed:
            await self._consumer.ack(self._printed[0], receipt=receipt and len(self._printed) == 1)
            self._printed.popleft()


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


@command(consume_app, "consume", "Messages", warnings=True)
async def consume(
    topics: Annotated[
        list[str],
        typer.Argument(
            help="One or several; a short name means persistent://public/default/NAME.", metavar="TOPIC..."
        ),
    ],
    subscription: Annotated[
        str, typer.Option("-s", "--subscription", help="Created at --start when it is new.", metavar="NAME")
    ],
    kind: Kind = "exclusive",
    count: Count = None,
    start: Begin = "latest",
    timeout: Timeout = None,
    format: Format = None,
    url: Url = DEFAULT_URL,
    as_json: bool = False,
    pattern: Annotated[
        bool,
        typer.Option(
            "--pattern", help="TOPIC is a regular expression: all topics of the namespace that it matches."
        ),
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow/--no-follow",
            help="Wait for more at the end, as tail -f does, or stop when everything stored is acknowledged.",
        ),
    ] = True,
) -> None:
    """Receive messages of a subscription, print each on a line, and acknowledge it.

    At the end it waits for more until Ctrl-C, unless --count, --timeout or --no-follow says when to stop.
    """
    encode = chosen(format, as_json=as_json)
    wanted = parsed("--pattern", lambda topics: topics_of(topics, pattern=pattern), topics)
    async with connected(url) as client, contextlib.AsyncExitStack() as stack:
        new = [] if pattern else await _without(client, topics, subscription, follow=follow)
        consumer = await stack.enter_async_context(
            client.subscribe(wanted, subscription, type=cast(Any, kind), start=start)
        )
        for topic in new:
            say(
                f"subscription {subscription} of {topic} is new; messages are kept for it until it is deleted "
                "(magnetar subscriptions delete)"
            )
        printer = Printer(consumer, encode)
        seen = 0
        try:
            while count is None or seen < count:
                message = await _next(client, consumer, printer, timeout, follow=follow)
                if message is None:
                    break
                await printer.print(message)
                seen += 1
        finally:
            await printer.flush(receipt=True)


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
    from magnetar.client import ReceiveTimeout, TopicTerminated

    with contextlib.suppress(ReceiveTimeout, TopicTerminated):
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
        except TopicTerminated:
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


@command(consume_app, "tail", "Messages", warnings=True)
async def tail(
    topic: Topic,
    count: Count = None,
    start: Begin = "latest",
    timeout: Timeout = None,
    format: Format = None,
    url: Url = DEFAULT_URL,
    as_json: bool = False,
) -> None:
    """Follow a topic without a subscription."""
    encode = chosen(format, as_json=as_json)
    async with connected(url) as client:
        await say_if_new(client, topic)
        async with client.create_reader(topic, start=start) as reader:
            try:
                await _tail(reader, count, timeout, encode)
            finally:
                sys.stdout.buffer.flush()


async def say_if_new(client: Client, topic: str) -> None:
    """A reader makes the topic that it reads: a misspelt name would wait for ever without a word."""
    try:
        await client.admin.topic_stats(topic)
    except TopicNotFound:
        say(
            f"topic {topic} did not exist; it is made now, and empty (magnetar topics list shows those that there are)"
        )
    except MagnetarError:
        pass  # what is not known is not said: reading tells what is wrong


async def _tail(reader: Reader, count: int | None, timeout: float | None, encode: Encode) -> None:
    from magnetar.client import ReceiveTimeout, TopicTerminated

    seen = 0
    while count is None or seen < count:
        try:
            message = await reader.read_next(timeout=0)
        except (ReceiveTimeout, TopicTerminated):
            sys.stdout.buffer.flush()
            try:
                message = await reader.read_next(timeout=timeout)
            except (ReceiveTimeout, TopicTerminated):
                return
        sys.stdout.buffer.write(encode(message) + b"\n")
        seen += 1
