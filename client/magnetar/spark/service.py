"""What drivers and tasks ask the broker: which topics and ledgers there are, and that ledgers are kept for them.

Spark calls a data source in many short-lived Python processes and never leaves one running beside a query. So each call
opens a connection of its own (`asking`), and the lease that keeps the ledgers of a query is renewed by whichever of its
tasks run; it outlives the gap between two of them, and nobody has to end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from magnetar.client import Client, connect
from magnetar.client.client import Opening
from magnetar.ledger.directory import parse_address
from magnetar.proto.commands import KeepLedgers, TopicLedgers
from magnetar.proto.errors import MagnetarError, MessageLost, RetryableError
from magnetar.proto.ids import TopicName

from .options import ReadOptions, WriteOptions
from .plan import Position, TopicLedger

_log = logging.getLogger(__name__)

T = TypeVar("T")
LEDGERS_PER_REQUEST = 1000
RENEWALS_PER_LEASE = 4
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class TopicPlan(NamedTuple):
    """The ledgers of a topic at one moment. `end`: after its last confirmed message."""

    topic: str
    ledgers: list[TopicLedger]
    end: Position
    bookies: dict[str, tuple[str, int]]  # id -> address, of all that the ledgers name
    lease: str  # "": none was taken

    @property
    def end_offset(self) -> int:
        """Topic-wide index after its last confirmed message."""
        return self.ledgers[-1].end_offset if self.ledgers else 0


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
    """Those of the options, or what the pattern finds now (persistent topics), sorted."""
    if not options.pattern:
        return list(options.topics)
    matches = re.compile(options.pattern).fullmatch
    names = [TopicName.parse(name) for name in await client.list_topics()]
    return [
        str(name)
        for name in names
        if name.domain == "persistent" and (matches(str(name)) or matches(name.short))
    ]


async def plan_of_topic(
    client: Client, topic: str, lease_s: float, lease: str = "", first: int = -1
) -> TopicPlan:
    """Takes a lease first, so that nothing of what it then finds is deleted. Raises TopicNotFound.

    `lease`: one to be renewed, and moved to the position id `first`, where there is one; a new one for each plan otherwise.
    """
    lease = await keep(client, topic, lease, lease_s, first)
    return (await ledgers_of_topic(client, topic))._replace(lease=lease)


async def ledgers_of_topic(client: Client, topic: str) -> TopicPlan:
    """The topic as it is now, without a lease: its ledgers may be gone at any time. Raises TopicNotFound."""
    ledgers: list[TopicLedger] = []
    bookies: dict[str, tuple[str, int]] = {}
    after, more, end = -1, True, (0, 0, 0)
    while more:
        found = await client.request(TopicLedgers(0, topic, after, LEDGERS_PER_REQUEST), topic=topic)
        ledgers += [TopicLedger(*row) for row in found["ledgers"]]
        bookies.update({bookie: parse_address(text) for bookie, text in found["bookies"].items()})
        more, end = found["more"], tuple(found["end"])
        after = ledgers[-1].position_id if ledgers else -1
    return TopicPlan(topic, ledgers, end, bookies, "")


async def keep(client: Client, topic: str, lease: str, lease_s: float, first: int = -1) -> str:
    """Takes (lease "") or renews a lease on the ledgers of a topic from the position id `first` on; returns its name."""
    command = KeepLedgers(0, topic, lease, round(lease_s * 1000), first)
    found = await client.request(command, topic=topic)
    return str(found["lease"])


@contextlib.asynccontextmanager
async def renewing(
    client: Client, topic: str, lease: str, lease_s: float, ledger: int
) -> AsyncIterator[None]:
    """Keeps a lease alive as long as the body runs. MessageLost if the ledger (position id) was not kept for the body."""

    async def renew() -> float:
        found = await client.request(KeepLedgers(0, topic, lease, round(lease_s * 1000)), topic=topic)
        if found["first"] is None or found["first"] > ledger:
            raise MessageLost(
                f"ledger {ledger} of {topic} was trimmed before it was read; raise the option lease_s, now {lease_s:g}"
            )
        return float(found["ttl_ms"]) / 1000  # the service may have granted less

    async def again(granted_s: float) -> None:
        while True:
            await asyncio.sleep(granted_s / RENEWALS_PER_LEASE)
            try:
                granted_s = await renew()
            except MessageLost:  # shows in the body, if it needs the ledger still
                return
            except MagnetarError as error:
                _log.warning("the lease on %s is not renewed yet: %s", topic, error)

    task = asyncio.create_task(again(await renew()))
    try:
        yield
    except MagnetarError:
        await renew()  # says so if this is the reason
        raise
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


__all__ = [
    "TopicPlan",
    "asking",
    "asking_once",
    "connected",
    "keep",
    "ledgers_of_topic",
    "on_a_loop",
    "plan_of_topic",
    "renewing",
    "topic_names",
]
