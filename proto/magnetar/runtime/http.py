"""HTTP of a daemon (server only): /metrics, /health and /ready by aiohttp on the same event loop.

    /metrics   Prometheus text
    /health    200 while the process works, "degraded" with what an operator should know (a restart does not help);
               503 with the reasons when a check fails: restart it
    /ready     200 when it takes traffic, 503 while it starts or drains: send no traffic

More routes come as aiohttp route definitions (the admin API of a later day).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence

from aiohttp import web

from .connection.addresses import listen_error
from .metrics import CONTENT_TYPE, Metrics

__all__ = ["HttpServer"]

# Name of a check -> "" if all is well, else what is wrong. Called at each request: must be quick.
Checks = Mapping[str, Callable[[], str]]


class HttpServer:
    """Made by `start`; owned by the daemon, which closes it last."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner
        self.addresses: list[tuple[str, int]] = []

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        *,
        metrics: Metrics,
        ready: Callable[[], bool],
        checks: Checks | None = None,
        warnings: Callable[[], Mapping[str, str]] = dict,
        routes: Sequence[web.AbstractRouteDef] = (),
        port_setting: str = "http_port",
        listening: socket.socket | None = None,
    ) -> HttpServer:
        """Listens, or takes over `listening`, which listens already. Raises InvalidSetting when the port is taken."""

        async def serve_metrics(_request: web.Request) -> web.Response:
            return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})

        async def serve_health(_request: web.Request) -> web.Response:
            wrong = {name: problem for name, check in (checks or {}).items() if (problem := check())}
            known = dict(warnings())
            status = "failing" if wrong else "degraded" if known else "ok"
            body = {"status": status, "problems": wrong, "warnings": known}
            return web.json_response(body, status=503 if wrong else 200)

        async def serve_ready(_request: web.Request) -> web.Response:
            is_ready = ready()
            return web.json_response({"ready": is_ready}, status=200 if is_ready else 503)

        application = web.Application(client_max_size=1024 * 1024)
        application.add_routes(
            [
                web.get("/metrics", serve_metrics),
                web.get("/health", serve_health),
                web.get("/ready", serve_ready),
                *routes,
            ]
        )
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0, handle_signals=False)
        await runner.setup()
        self = cls(runner)
        try:
            if listening is None:
                await web.TCPSite(runner, host, port).start()
            else:
                await web.SockSite(runner, listening).start()
        except OSError as error:
            await runner.cleanup()
            raise listen_error(error, host, port, port_setting) from error
        self.addresses = [(str(address[0]), int(address[1])) for address in runner.addresses]
        return self

    async def close(self) -> None:
        """Finishes requests in progress, for a second at most."""
        await self._runner.cleanup()
