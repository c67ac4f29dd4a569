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
from collections.abc import Awaitable, Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any, Final
from urllib.parse import unquote

import aiohttp
import msgspec
from aiohttp import web

from magnetar.proto.errors import MagnetarError, ServiceNotReady, TopicNotFound, TopicNotServed, Unsupported

from ...service.broker import BrokerService
from ...topics.registry import Broker
from .cluster_routes import CLUSTER_ROUTES, NEVER
from .openapi import document, page
from .own_routes import OWN_ROUTES
from .policy_routes import POLICY_ROUTES
from .routes import REFUSED, WHOLE, Asked, Elsewhere, Route, Table, names_in
from .schemas_routes import SCHEMAS_ROUTES
from .statuses import Refused, status_of
from .tenancy_routes import TENANCY_ROUTES
from .topics_routes import TOPICS_ROUTES, partitions

_log = logging.getLogger(__name__)

Others = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


async def _openapi(asked: Asked) -> dict[str, Any]:
    """What there is, as OpenAPI."""
    return await asyncio.to_thread(document, ROUTES, version("magnetar"))


async def _page(asked: Asked) -> web.Response:
    """What there is, for people."""
    return web.Response(text=await asyncio.to_thread(page, ROUTES), content_type="text/html")


async def _status(asked: Asked) -> web.Response:
    """Whether this broker may serve its topics, for load balancers."""
    if not asked.service.valid:
        raise ServiceNotReady("this broker has no session with the metadata store; others may own its topics")
    return web.Response(text="OK")


ROUTES: Final = (
    *TOPICS_ROUTES,
    *POLICY_ROUTES,
    *TENANCY_ROUTES,
    *CLUSTER_ROUTES,
    *SCHEMAS_ROUTES,
    *OWN_ROUTES,
    Route("GET", "/status", _status),
    Route("GET", "/status.html", _status),
    Route("GET", "/openapi.json", _openapi),
    Route("GET", "/openapi.html", _page),
)
TABLE: Final = Table(ROUTES)
_ASKED_AT_ONCE = 32
_JOINED_AT_ONCE = 100  # in a turn of the loop, a few ms; more in a thread
_FORWARD_TIMEOUT_S = 60.0
_JSON: Final = "application/json"


class AdminServer:
    """Answers the requests of one broker's HTTP."""

    def __init__(self, broker: Broker, others: Others | None = None) -> None:
        """`others`: what answers paths of others, which come first; None of it: they are none of theirs."""
        self._service = BrokerService(broker)
        self._others = others

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The answer, whatever becomes of it."""
        try:
            if self._others is not None and (answer := await self._others(request)) is not None:
                return answer
            path = request.rel_url.raw_path
            segments = [unquote(part, errors="strict") for part in path.strip("/").split("/")]
            if not (rows := TABLE.find(segments)):
                _refuse_what_never_is(segments[2:])
                raise Refused(404, f"there is no {path[:200]} here; /openapi.json lists what there is")
            return await self._handle(request, rows, segments)
        except web.HTTPRequestEntityTooLarge:
            return _failed(Refused(413, "the body is larger than 1 MiB, which nothing here needs"))
        except UnicodeDecodeError:
            return _failed(Refused(400, "the path is not UTF-8"))
        except (MagnetarError, Refused) as error:
            return _failed(error)
        except ConnectionError:  # who asked has left
            raise
        except Exception as error:
            _log.exception("%s %.200s failed", request.method, request.raw_path)
            return _failed(Refused(500, f"{error!r}: a defect of this broker, whose log says more"))

    async def _handle(
        self, request: web.Request, rows: Mapping[str, Route], segments: list[str]
    ) -> web.StreamResponse:
        method = "GET" if request.method == "HEAD" and "HEAD" not in rows else request.method
        row = rows.get(method)
        if row is None:
            allow = ", ".join(sorted({*rows, "OPTIONS", *(["HEAD"] if "GET" in rows else [])}))
            if method == "OPTIONS":
                return web.Response(status=204, headers={"Allow": allow})
            _refuse_what_never_is(segments[2:4])  # names of users stand behind that
            return _failed(Refused(405, f"this path has no {method[:20]}, only {allow}"), {"Allow": allow})
        names, body = names_in(row, segments), await request.read()
        asked = Asked(self._service, self._each, row, names, request.query, body, request)
        try:
            answer = await self._answer(asked)
        except Elsewhere as elsewhere:
            return web.Response(status=307, headers={"Location": elsewhere.location(asked)})
        if isinstance(answer, web.StreamResponse):
            return answer
        if answer is None:
            return web.Response(status=row.status or (200 if method == "GET" else 204))
        body = msgspec.json.encode(answer)
        return web.Response(status=row.status or 200, body=body, content_type=_JSON)

    async def _answer(self, asked: Asked) -> Any:
        join = asked.route.partitions
        if not asked.route.of_topic or join is WHOLE:
            return await self._answer_here(asked)
        count = await self._service.partitions(asked, asked.topic)
        if not count:
            return await self._answer_here(asked)
        if join is REFUSED:
            raise Refused(
                405,
                f"{asked.topic} is a partitioned topic, of which this is not possible as a whole: ask it of its "
                f"partitions, {asked.names['topic']}-partition-0 to {count - 1}",
            )
        answers = await asked.of_partitions(range(count))
        large = count > _JOINED_AT_ONCE
        joined = await asyncio.to_thread(join, answers, asked) if large else join(answers, asked)
        if isinstance(joined, dict) and "metadata" in joined:
            joined["metadata"] = await partitions(asked)
        return joined

    async def _answer_here(self, asked: Asked) -> Any:
        for _ in range(2):
            try:
                return await asked.route.run(asked)
            except TopicNotServed:
                if not asked.route.of_topic:
                    raise
                authoritative = asked.authoritative
                owner = await self._service.admin.owner(asked, asked.topic, authoritative=authoritative)
                if not owner.here:
                    raise Elsewhere(owner) from None
        raise ServiceNotReady(f"{asked.topic} is moving between brokers; try again")

    async def _each(self, requests: Iterable[Asked]) -> dict[str, Any]:
        """As `Asked.each` says: here, or where a redirect leads."""
        left = iter(requests)
        found: dict[str, Any] = {}
        failed: list[MagnetarError | Refused] = []

        async def work() -> None:
            for asked in left:
                try:
                    found[asked.topic] = await self._wherever(asked)
                except (MagnetarError, Refused) as error:
                    failed.append(error)
                # What is in memory takes a turn of the loop for _ASKED_AT_ONCE of them.
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as workers:
            for _ in range(_ASKED_AT_ONCE):
                workers.create_task(work())
        for error in failed:
            if status_of(error) != 404 or not found:
                raise error
        return found

    async def _wherever(self, asked: Asked) -> Any:
        try:
            return msgspec.to_builtins(await self._answer_here(asked))
        except Elsewhere as elsewhere:
            return await _forward(asked, elsewhere.location(asked))


def _refuse_what_never_is(segments: list[str]) -> None:
    """Raises Unsupported, with what Magnetar has in its place."""
    if never := [NEVER[segment] for segment in segments if segment in NEVER]:
        raise Unsupported(never[-1])


async def _forward(asked: Asked, url: str) -> Any:
    """Asks another broker, and whoever that names."""
    timeout, headers = aiohttp.ClientTimeout(total=_FORWARD_TIMEOUT_S), {"Content-Type": _JSON}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(asked.route.method, url, data=asked.body or None, headers=headers) as response,
        ):
            body = await response.read()
        answer = msgspec.json.decode(body) if body else None
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        raise ServiceNotReady(f"the broker of {asked.topic} does not answer at {url}: {error!r}") from None
    if response.status >= 400:
        reason = str(answer.get("reason", "") if isinstance(answer, dict) else "")
        raise TopicNotFound(reason) if response.status == 404 else Refused(response.status, reason)
    return answer


def _failed(error: MagnetarError | Refused, headers: Mapping[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode({"reason": error.message})
    return web.Response(status=status_of(error), body=body, content_type=_JSON, headers=headers)
