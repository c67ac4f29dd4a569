"""The HTTP administration of a broker on fakes, over a real socket."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from yarl import URL

from magnetar.broker import Broker
from magnetar.broker.listeners.http.server import AdminServer
from support.broker_kit import running_broker


class Answered(NamedTuple):
    """A status, headers in lower case, and the body: JSON, or bytes that are none."""

    status: int
    headers: dict[str, str]
    body: Any

    @property
    def reason(self) -> str:
        """Of an error."""
        return str(self.body["reason"])


class Admin:
    """Asks over HTTP."""

    def __init__(self, session: aiohttp.ClientSession, broker: Broker, url: str) -> None:
        self.broker = broker
        self.url = url
        self._session = session

    async def __call__(
        self, method: str, path: str, body: Any = None, *, raw: bytes | None = None
    ) -> Answered:
        """`path` as it is sent; `raw`: a body that need not be JSON."""
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        path = path if path.startswith("/") else f"/admin/v2/{path}"
        async with self._session.request(
            method, URL(self.url + path, encoded=True), data=io.BytesIO(data) if data else None, allow_redirects=False,
            headers={"Content-Type": "application/json"},
        ) as response:  # fmt: skip
            answer = await response.read()
            try:
                found = json.loads(answer) if answer else None
            except ValueError:
                found = answer
            return Answered(
                response.status, {name.lower(): text for name, text in response.headers.items()}, found
            )


@asynccontextmanager
async def serving_admin(broker: Broker, port: int = 0) -> AsyncIterator[Admin]:
    """Of a broker that runs."""
    application = web.Application(client_max_size=1024 * 1024)
    application.router.add_route("*", "/{path:.*}", AdminServer(broker).handle)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    host, port = runner.addresses[0]
    try:
        async with aiohttp.ClientSession() as session:
            yield Admin(session, broker, f"http://{host}:{port}")
    finally:
        await runner.cleanup()


@asynccontextmanager
async def administered(**settings: Any) -> AsyncIterator[Admin]:
    """A broker of its own."""
    async with running_broker(**settings) as broker, serving_admin(broker) as admin:
        yield admin
