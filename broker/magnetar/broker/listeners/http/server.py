"""Requests of HTTP: a row is found and run, at the broker that serves the topic.

    no row of the path --> 404    none of the method --> 405 with Allow    OPTIONS --> 204 with Allow    HEAD --> as GET
    the row runs --TopicNotServed--> who serves it? --another broker--> 307 to its HTTP address, with `authoritative`
        |                               `--this one, now--> once more
        |--an error--> its status (`statuses`) and {"reason": "..."}
        `--a result--> JSON; nothing to say: 200 for GET, else 204

What concerns each partition of a topic is asked of each at its owner: here, or where such a redirect leads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import unquote

import aiohttp
import msgspec
from aiohttp import web

from magnetar.proto.errors import MagnetarError, ServiceNotReady, TopicNotFound, TopicNotServed

from ...service.broker import BrokerService
from ...topics.registry import Broker
from .routes import REFUSED, WHOLE, Asked, Elsewhere, Found, Table
from .statuses import Refused, status_of
from .topics_routes import TOPICS_ROUTES

_log = logging.getLogger(__name__)

ROUTES: Final = (*TOPICS_ROUTES,)
TABLE: Final = Table(ROUTES)
_PARTITIONS_AT_ONCE = 32
_FORWARD_TIMEOUT_S = 60.0


class AdminServer:
    """Answers the requests of one broker's HTTP."""

    def __init__(self, broker: Broker) -> None:
        self._service = BrokerService(broker)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The answer, whatever becomes of it."""
        try:
            segments = [unquote(part, errors="strict") for part in _raw_path(request).strip("/").split("/")]
            found = TABLE.find(segments)
            if found is None:
                raise Refused(
                    404, f"there is no {_raw_path(request)[:200]} here; /openapi.json lists what there is"
                )
            return await self._handle(request, found)
        except web.HTTPRequestEntityTooLarge:
            return _failed(Refused(413, "the body is larger than 1 MiB, which nothing here needs"))
        except MagnetarError as error:
            return _failed(error)
        except UnicodeDecodeError:
            return _failed(Refused(400, "the path is not UTF-8"))
        except Exception as error:
            _log.exception("%s %s failed", request.method, request.raw_path[:200])
            return _failed(Refused(500, f"{error!r}: a defect of this broker, whose log says more"))

    async def _handle(self, request: web.Request, found: Found) -> web.StreamResponse:
        method = "GET" if request.method == "HEAD" and "HEAD" not in found.rows else request.method
        row = found.rows.get(method)
        if row is None:
            allowed = {**found.rows, "OPTIONS": None, **({"HEAD": None} if "GET" in found.rows else {})}
            headers = {"Allow": ", ".join(sorted(allowed))}
            if method == "OPTIONS":
                return web.Response(status=204, headers=headers)
            return _failed(Refused(405, f"this path has no {method[:20]}, only {headers['Allow']}"), headers)
        body = await request.read()
        asked = Asked(self._service, self, row, found.names(row), request.query, body)
        try:
            answer = await self._answer(asked)
        except Elsewhere as elsewhere:
            return web.Response(status=307, headers={"Location": elsewhere.location(asked)})
        if isinstance(answer, web.StreamResponse):
            return answer
        if answer is None:
            return web.Response(status=row.status or (200 if method == "GET" else 204))
        return web.Response(
            status=row.status or 200, body=msgspec.json.encode(answer), content_type="application/json"
        )

    async def _answer(self, asked: Asked) -> Any:
        row = asked.route
        if row.resource == "topic" and row.partitions is not WHOLE:
            count = await self._service.partitions(asked, asked.topic)
            if count and row.partitions is REFUSED:
                raise Refused(
                    405,
                    f"{asked.topic} is a partitioned topic, of which this is not possible as a whole: ask it of its "
                    f"partitions, {asked.names['topic']}-partition-0 to {count - 1}",
                )
            if count:
                return row.partitions(await self.of_partitions(asked, range(count)), asked)
        return await self._answer_here(asked)

    async def _answer_here(self, asked: Asked) -> Any:
        for _ in range(2):
            try:
                return await asked.route.run(asked)
            except TopicNotServed:
                if asked.route.resource != "topic":
                    raise
                authoritative = asked.authoritative
                owner = await self._service.admin.owner(asked, asked.topic, authoritative=authoritative)
                if not owner.here:
                    raise Elsewhere(owner) from None
        raise ServiceNotReady(f"{asked.topic} is moving between brokers; try again")

    async def of_partitions(self, asked: Asked, numbers: Iterable[int]) -> dict[str, Any]:
        """As `Partitions` says: here, or where a redirect leads."""
        slots = asyncio.Semaphore(_PARTITIONS_AT_ONCE)

        async def one(part: Asked) -> Any:
            async with slots:
                try:
                    return msgspec.to_builtins(await self._answer_here(part))
                except Elsewhere as elsewhere:
                    return await _forward(part, elsewhere.location(part))

        parts = [asked.partition(number) for number in numbers]
        answers = await asyncio.gather(*map(one, parts), return_exceptions=True)
        found: dict[str, Any] = {}
        failed: list[BaseException] = []
        for part, answer in zip(parts, answers, strict=True):
            if not isinstance(answer, BaseException):
                found[part.topic] = answer
            elif not isinstance(answer, MagnetarError) or status_of(answer) != 404:
                raise answer
            else:
                failed.append(answer)
        if failed and not found:
            raise failed[0]
        return found


async def _forward(asked: Asked, url: str) -> Any:
    """Asks another broker, and whoever that names."""
    timeout = aiohttp.ClientTimeout(total=_FORWARD_TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(asked.route.method, url, data=asked.body or None, headers=headers) as response,
        ):
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServiceNotReady(f"the broker of {asked.topic} cannot be reached at {url}: {error!r}") from None
    try:
        answer = msgspec.json.decode(body) if body else None
    except msgspec.DecodeError:
        answer = None
    if response.status >= 400:
        reason = answer.get("reason", "") if isinstance(answer, dict) else ""
        raise TopicNotFound(str(reason)) if response.status == 404 else Refused(response.status, str(reason))
    return answer


def _raw_path(request: web.Request) -> str:
    return request.rel_url.raw_path


def _failed(error: MagnetarError, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status_of(error),
        body=msgspec.json.encode({"reason": error.message}),
        content_type="application/json",
        headers=headers,
    )
