"""Where each topic is served: asked of the service once, and known until that connection breaks or the topic moves."""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial
from typing import Any

from magnetar.proto.commands import Lookup
from magnetar.proto.errors import (
    ConnectionLost,
    LookupAgainError,
    MagnetarError,
    RequestTimeout,
    ServiceNotReady,
)

from ..service_url import broker_address
from .broker_connection import BrokerConnection
from .brokers import BrokerConnections
from .calls import SharedCalls
from .core.search import Ask, Connect, Failed, Search

log = logging.getLogger("magnetar.client")

# An owner that cannot be reached is reported after a pause of up to so long: it has a successor in seconds at the earliest,
# when its session ends, and all its clients are about to report it.
REPORT_PAUSE_S = 0.5
# Answers about it come to all of them at the same moment. They are followed after a pause of up to this part of the time for
# which they were held, within a second: those who waited for 10 s together come spread over the second that follows.
FOLLOW_PAUSE_PART = 0.1
LONGEST_FOLLOW_PAUSE_S = 1.0
# Topics whose owner is remembered; the one that was looked up first is forgotten first.
MAX_OWNERS = 100_000


class Lookups:
    """The look-ups of one client in one cluster. `timeout`: for each answer, in seconds; one that is held counts as well."""

    def __init__(self, brokers: BrokerConnections, timeout: float, rng: random.Random) -> None:
        self._brokers = brokers
        self._timeout = timeout
        self._rng = rng
        self._owners: dict[str, BrokerConnection] = {}  # by topic; the connections of some have broken
        # Topic -> URL, as the broker said that closed its producers and consumers.
        self._goes_to: dict[str, str] = {}
        self._searches = SharedCalls[str, BrokerConnection]("looking up")

    async def find(self, topic: str, *, afresh: bool = False) -> BrokerConnection:
        """To the broker that serves `topic`; `afresh`: though that is known. Raises what the look-up failed with."""
        owner = self._owners.get(topic)
        if owner is not None and not afresh and not owner.closed:
            return owner
        return await self._searches.get(topic, partial(self._search, topic))

    def moved(self, topic: str, error: BaseException | None) -> bool:
        """The topic is not where it was, if the error says so. True if it says where it is now."""
        if not isinstance(error, LookupAgainError):
            return False
        self._owners.pop(topic, None)
        url = str(error.details.get("url") or "")
        if url:
            self._goes_to[topic] = url
            _bound(self._goes_to)
        return bool(url)

    def stop(self) -> None:
        """Whoever waits gets ConnectionLost."""
        self._searches.stop()

    async def close(self) -> None:
        """Ends what is under way."""
        self._searches.stop()
        await self._searches.wait_ended()

    async def _search(self, topic: str) -> BrokerConnection:
        search = Search()
        step = search.begin(self._goes_to.pop(topic, ""))
        last: MagnetarError = ConnectionLost("nobody was asked")
        while not isinstance(step, Failed):
            try:
                if isinstance(step, Ask):
                    url, final = await self._ask(topic, step)
                    step = search.answered(url, final)
                else:
                    return await self._connect(topic, step)
            except ConnectionLost as error:
                last = error
                step = search.unreachable()
                if isinstance(step, Ask):
                    log.info("%s: %s; asking another broker", topic, error)
        if step.why:
            raise LookupAgainError(f"{topic} was not found: {step.why}")
        raise last

    async def _ask(self, topic: str, ask: Ask) -> tuple[str, bool]:
        """The answer of a look-up."""
        if ask.unreachable:
            await asyncio.sleep(min(REPORT_PAUSE_S, 0.1 * self._timeout) * self._rng.random())
            connection = await self._brokers.to_service(broker_address(ask.unreachable))
        elif ask.url:
            connection = await self._brokers.to(broker_address(ask.url))
        else:
            connection = await self._brokers.to_service()
        # The broker holds the answer about an owner that failed: those wait apart, and hold nobody up.
        async with connection.held_lookups if ask.unreachable else connection.lookups:
            asked_at = asyncio.get_running_loop().time()
            try:
                command = Lookup(0, topic, ask.authoritative, ask.unreachable)
                answer = await connection.request(command, self._timeout)
            except (ServiceNotReady, RequestTimeout) as error:
                if not (ask.url or ask.unreachable):
                    self._brokers.doubt(error)
                raise
        if ask.unreachable:
            held = asyncio.get_running_loop().time() - asked_at
            await asyncio.sleep(min(FOLLOW_PAUSE_PART * held, LONGEST_FOLLOW_PAUSE_S) * self._rng.random())
        return str(answer["url"]), bool(answer["final"])

    async def _connect(self, topic: str, step: Connect) -> BrokerConnection:
        connection = await self._brokers.to(broker_address(step.url), try_now=step.again)
        self._owners[topic] = connection
        _bound(self._owners)
        self._goes_to.pop(topic, None)
        return connection


def _bound(by_topic: dict[str, Any]) -> None:
    if len(by_topic) > MAX_OWNERS:
        del by_topic[next(iter(by_topic))]
