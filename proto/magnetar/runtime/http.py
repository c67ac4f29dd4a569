"""HTTP of a daemon (server only): /metrics, /health and /ready by aiohttp on the same event loop.

/metrics   Prometheus text
/health    200 while the process works, "degraded" with what an operator should know (a restart does not help);
           503 with the reasons when a check fails: restart it
/ready     200 when it takes traffic, 503 while it starts or drains: send no traffic
/NAME/...  what the daemon adds: commands that answer with a JSON object a line

A command that fails answers with status 400 and {"error", "code"}, or with such a line behind those that it had sent.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Any

from aiohttp import web

from magnetar.proto.errors import MagnetarError

from .metrics import CONTENT_TYPE, Metrics

__all__ = ["HttpServer"]

# From the arguments of a query to the objects of its answer. Raises MagnetarError.
Command = Callable[[Mapping[str, str]], AsyncIterator[Mapping[str, Any]]]

# Name of a check -> "" if all is well, else what is wrong. Called at each request: must be quick.
Checks = Mapping[str, Callable[[], str]]


class HttpServer:
    """Made by `start`; owned by the daemon, which closes it last."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner

    @classmethod
    async def start(
        cls,
        listening: socket.socket,
        *,
        metrics: Metrics,
        ready: Callable[[], bool],
        checks: Checks,
        warnings: Callable[[], Mapping[str, str]],
        commands: Mapping[tuple[str, str], Command] = MappingProxyType({}),
    ) -> HttpServer:
        """Serves the connections of `listening`, which listens already. `commands`: by method and path."""

        async def serve_metrics(_request: web.Request) -> web.Response:
            return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})

        async def serve_health(_request: web.Request) -> web.Response:
            wrong = {name: problem for name, check in checks.items() if (problem := check())}
            known = dict(warnings())
            status = "failing" if wrong else "degraded" if known else "ok"
            body = {"status": status, "problems": wrong, "warnings": known}
            return web.json_response(body, status=503 if wrong else 200)

        async def serve_ready(_request: web.Request) -> web.Response:
            is_ready = ready()
            return web.json_response({"ready": is_ready}, status=200 if is_ready else 503)

        application = web.Application(client_max_size=1024 * 1024)
        application.router.add_get("/metrics", serve_metrics)
        application.router.add_get("/health", serve_health)
        application.router.add_get("/ready", serve_ready)
        for (method, path), command in commands.items():
            application.router.add_route(method, path, _lines_of(command))
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0, handle_signals=False)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        return cls(runner)

    async def close(self) -> None:
        """Finishes requests in progress, for a second at most."""
        await self._runner.cleanup()


def _lines_of(command: Command) -> Callable[[web.Request], Any]:
    async def serve(request: web.Request) -> web.StreamResponse:
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

    return serve
