"""HTTP of a daemon (server only): /metrics, /health and /ready by aiohttp on the same event loop.

/metrics   Prometheus text
/health    200 while the process works, "degraded" with what an operator should know (a restart does not help);
           503 with the reasons when a check fails: restart it
/ready     200 when it takes traffic, 503 while it starts or drains: send no traffic
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from aiohttp import web

from .metrics import CONTENT_TYPE, Metrics

__all__ = ["HttpServer"]

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
    ) -> HttpServer:
        """Serves the connections of `listening`, which listens already."""

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
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0, handle_signals=False)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        return cls(runner)

    async def close(self) -> None:
        """Finishes requests in progress, for a second at most."""
        await self._runner.cleanup()
