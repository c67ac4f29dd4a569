"""HTTP of a daemon (server only), by aiohttp on the same event loop. It answers while the daemon starts and stops, too.

/metrics        Prometheus text; 503 while the daemon starts or stops
/health/live    200 while the process works; 503 when a component has failed, no answer when the loop hangs: restart it
/health/ready   200 when it takes traffic; 503 with the reasons when it does not: send no traffic
/health         both in one, with what an operator should know ("degraded": a restart does not help); 503 as for live
/NAME/...       what the daemon adds: commands that answer with a JSON object a line
/...            all others: what the daemon's `handler` makes of them, the administration of a broker

A command that fails answers with status 400 and {"error", "code"}, or with such a line behind those that it had sent.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from aiohttp import web

from magnetar.proto.errors import MagnetarError

from .metrics import CONTENT_TYPE, Metrics

# Answers a request.
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# From the arguments of a query to the objects of its answer. Raises MagnetarError.
Command = Callable[[Mapping[str, str]], AsyncIterator[Mapping[str, Any]]]


class Pages(Protocol):
    """What the daemon says. Called at each request: must be quick."""

    def failure(self) -> str:
        """Why the process should be started anew; "" while it works."""

    def reasons(self) -> Mapping[str, str]:
        """Why no traffic should be sent to it, by name; empty: it is ready."""

    def warnings(self) -> Mapping[str, str]:
        """What an operator should know although it works."""

    def metrics(self) -> Metrics | None:
        """None: not now."""

    def commands(self) -> Mapping[tuple[str, str], Command]:
        """What it does on request, by method and path."""

    async def handler(self) -> Handler | None:
        """What answers all other paths; None: nobody does. Raises HTTPServiceUnavailable: not now."""


class HttpServer:
    """Made by `start`; owned by the daemon, which closes it last."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner

    @classmethod
    async def start(cls, listening: socket.socket, pages: Pages) -> HttpServer:
        """Serves the connections of `listening`, which listens already."""

        async def serve_metrics(_request: web.Request) -> web.Response:
            metrics = pages.metrics()
            if metrics is None:
                return web.Response(status=503, text="the daemon starts or stops")
            return web.Response(body=await metrics.render(), headers={"Content-Type": CONTENT_TYPE})

        async def serve_live(_request: web.Request) -> web.Response:
            failure = pages.failure()
            reasons = {"failed": failure} if failure else {}
            return web.json_response(
                {"live": not failure, "reasons": reasons}, status=503 if failure else 200
            )

        async def serve_ready(_request: web.Request) -> web.Response:
            reasons = dict(pages.reasons())
            body = {"ready": not reasons, "reasons": reasons, "notes": dict(pages.warnings())}
            return web.json_response(body, status=503 if reasons else 200)

        async def serve_health(_request: web.Request) -> web.Response:
            failure = pages.failure()
            warnings = {**pages.warnings(), **pages.reasons()}
            body = {
                "status": "failing" if failure else "degraded" if warnings else "ok",
                "problems": {"failed": failure} if failure else {},
                "warnings": warnings,
            }
            return web.json_response(body, status=503 if failure else 200)

        async def serve_command(request: web.Request) -> web.StreamResponse:
            command = pages.commands().get((request.method, request.path))
            if command is not None:
                return await _answer(command, request)
            handler = await pages.handler()
            if handler is None:
                raise web.HTTPNotFound
            return await handler(request)

        application = web.Application(client_max_size=1024 * 1024)
        application.router.add_get("/metrics", serve_metrics)
        application.router.add_get("/health", serve_health)
        application.router.add_get("/health/live", serve_live)
        application.router.add_get("/health/ready", serve_ready)
        application.router.add_route("*", "/{command:.*}", serve_command)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0, handle_signals=False)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        return cls(runner)

    async def close(self) -> None:
        """Finishes requests in progress, for a second at most."""
        await self._runner.cleanup()


async def _answer(command: Command, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    async with contextlib.aclosing(command(request.query)) as objects:  # type: ignore[type-var]
        try:
            async for found in objects:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(json.dumps(found).encode() + b"\n")
        except MagnetarError as error:
            failure = {"error": error.message, "code": error.code}
            if not response.prepared:
                return web.json_response(failure, status=400)
            await response.write(json.dumps(failure).encode() + b"\n")
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof()
    return response
