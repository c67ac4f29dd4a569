"""What drivers and tasks ask the broker: which topics and ledgers there are.

Spark calls a data source in many short-lived Python processes and never leaves one running beside a query. So each call
opens a connection of its own (`asking`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from magnetar.client import Client, connect
from magnetar.client.administration import ask
from magnetar.client.client import Opening
from magnetar.proto.commands import TopicLedgers
from magnetar.proto.errors import RetryableError
from magnetar.proto.ids import NO_PARTITION, TopicName

from .bookies import known_bookies
from .options import ReadOptions, WriteOptions
from .plan import KnownBookie, Position, TopicLedger

_log = logging.getLogger(__name__)

T = TypeVar("T")
LEDGERS_PER_REQUEST = 1000
PAST_ALL_OFFSETS = 1 << 63
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class TopicPlan(NamedTuple):
    """Ledgers of a topic at one moment: all from the first one that is there, or that was asked for."""

    topic: str
    ledgers: list[TopicLedger]
    end: Position  # after the last confirmed message of the topic
    bookies: dict[str, KnownBookie]  # by id, all that the ledgers name
    lease: str  # "": none was taken
    end_offset: int  # topic-wide index of `end`
    created_ms: int  # tells a topic from one of the same name that was deleted before


@contextlib.asynccontextmanager
async def connected(options: ReadOptions | WriteOptions) -> AsyncIterator[Client]:
    """A client of the service; one that is being restarted is waited for. Raises ConnectionLost, which names the address."""

    async def opened() -> Client:
        return await _connect(options)

    async with await _again(opened, options.timeout_s) as client:
        yield client


def _connect(options: ReadOptions | WriteOptions) -> Opening[Client]:
    return connect(options.service_url, operation_timeout=options.timeout_s, name="spark")


def asking_once(options: ReadOptions | WriteOptions, work: Callable[[Client], Awaitable[T]]) -> T:
    """Runs `work` on a loop of its own, for those who want to know at once that the service is not there."""
    return on_a_loop(lambda: _work(options, work))


async def _work(options: ReadOptions | WriteOptions, work: Callable[[Client], Awaitable[T]]) -> T:
    async with _connect(options) as client:
        return await work(client)


def asking(options: ReadOptions | WriteOptions, work: Callable[[Client], Awaitable[T]]) -> T:
    """Runs `work` on a loop of its own, for the calls that Spark makes without one.

    Spark repeats tasks and not these calls: an error in one ends the query. So what may succeed later is done again until
    timeout_s is over, with the service or a bookie being restarted meanwhile: `work` may be repeated.
    """

    return on_a_loop(lambda: _again(lambda: _work(options, work), options.timeout_s))


def on_a_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs `work` to its end on a loop of its own: in a thread of its own where this one has a loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1, "magnetar") as thread:
        return thread.submit(lambda: asyncio.run(work())).result()


async def _again(attempt: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    loop = asyncio.get_running_loop()
    deadline, pause_s = loop.time() + timeout_s, FIRST_PAUSE_S
    while True:
        try:
            return await attempt()
        except RetryableError as error:
            if loop.time() + pause_s > deadline:
                raise
            _log.info("asked again in %g s: %s", pause_s, error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def topic_names(client: Client, options: ReadOptions) -> list[str]:
    """Those of the options, or what the pattern finds now (persistent topics), sorted; partitions for a partitioned one."""
    if not options.pattern:
        return [name for topic in options.topics for name in await logs_of(client, topic)]
    matches = re.compile(options.pattern).fullmatch
    partitioned: dict[TopicName, bool] = {}
    for name in [TopicName.parse(name) for name in await client.admin.list_topics()]:
        if name.persistent and (matches(str(name.whole)) or matches(name.whole.short)):
            partitioned[name.whole] = name.partition != NO_PARTITION
    logs = [
        await logs_of(client, str(name)) if several else [str(name)] for name, several in partitioned.items()
    ]
    return list(itertools.chain.from_iterable(logs))


async def logs_of(client: Client, topic: str) -> list[str]:
    """The full name of a topic, or those of its partitions: each of them has a log of its own."""
    name = TopicName.parse(topic)
    return [str(name.partition_of(n)) for n in range(await client.admin.partitions(topic))] or [str(name)]


async def ledgers_of_topic(
    client: Client,
    topic: str,
    after: int = -1,
    until_offset: int = PAST_ALL_OFFSETS,
    count: int = LEDGERS_PER_REQUEST,
) -> TopicPlan:
    """The topic as it is now: ledgers with position ids above `after`, page by page until one ends at `until_offset`.

    They may be deleted at any time unless a lease is held (`leases`). Raises TopicNotFound.
    """
    ledgers: list[TopicLedger] = []
    bookies: dict[str, KnownBookie] = {}
    while True:
        found = await ask(client.admin, TopicLedgers(0, topic, after, count), topic=topic)
        ledgers += [TopicLedger(*row) for row in found["ledgers"]]
        bookies |= known_bookies(found["bookies"], found["identities"])
        if not found["more"] or (ledgers and ledgers[-1].end_offset >= until_offset):
            end = tuple(found["end"])
            return TopicPlan(topic, ledgers, end, bookies, "", found["end_offset"], found["created_ms"])
        after = ledgers[-1].position_id
