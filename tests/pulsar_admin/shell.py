"""Types the commands of `commands.txt` into the real pulsar-shell, and notes what came of each.

That is the HTTP requests that it made, what the service answered, and what the operator saw. Between pulsar-shell and the
service stands a proxy. pulsar-shell is one process for all commands (a Java virtual machine for each would take an hour), so
each is preceded by a request for the cluster `mark-N`, which the proxy answers itself: by that it knows which command
follows, and it does there what the lines with "!" ask for, and runs those with "$".
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

COMMANDS = Path(__file__).with_name("commands.txt")
_MARK = re.compile(r"/admin/v2/clusters/mark-(\d+)$")
_SECTION = re.compile(r"^\[\d+/\d+\] Executing (.*)$", re.MULTILINE)
_OF_CONNECTION = {
    "host",
    "content-length",
    "connection",
    "transfer-encoding",
    "keep-alive",
    "accept-encoding",
}
# Requests that the tool does not wait for, and whose they are.
_LATE = {"/admin/v2/brokers/backlog-quota-check": "brokers backlog-quota-check"}
_KEPT_HEADERS = ("location", "content-type")  # and those of Pulsar, X-Pulsar-*


class Recorder:
    """A proxy in front of `service` that knows which command is running."""

    def __init__(self, pulsar: Path, service: str, native: str, pause_s: float = 0.0) -> None:
        """`pulsar`: its distribution; `service`, `native`: addresses of HTTP and clients; `pause_s` before each command."""
        self._pulsar = pulsar
        self._service = service
        self._native = native
        self._pause_s = pause_s
        self._lines = commands()
        self._exchanges: list[list[dict[str, Any]]] = [[] for _ in self._lines]
        self._ended: dict[int, tuple[str, int]] = {}  # of lines with "$": what was printed, and the exit code
        self._current = 0
        self._programs = Programs(service)

    async def run(self) -> list[dict[str, Any]]:
        async with aiohttp.ClientSession(auto_decompress=True) as self._session:
            self._programs.session = self._session
            app = web.Application(client_max_size=1 << 26)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            try:
                self._url = f"http://127.0.0.1:{port}/"
                seen = await self._type()
            finally:
                await self._programs.close()
                await runner.cleanup()
        return [
            {
                "command": line,
                "http": http,
                "seen": seen.get(number, ""),
                "exit": self._ended.get(number, ("", None))[1],
            }
            for number, (line, http) in enumerate(zip(self._lines, self._exchanges, strict=True))
        ]

    async def _type(self) -> dict[int, str]:
        with tempfile.TemporaryDirectory() as folder:
            config, script = Path(folder, "client.conf"), Path(folder, "commands")
            config.write_text(f"webServiceUrl={self._url}\nbrokerServiceUrl={self._native}\n")
            typed = []
            for number, line in enumerate(self._lines):
                typed.append(f"admin clusters get mark-{number}")
                typed += [] if line[0] in "!$" else [f"admin {line}"]
            typed.append(f"admin clusters get mark-{len(self._lines)}")
            script.write_text("\n".join(typed) + "\n")
            output, _ = await self._tool("pulsar-shell", "-c", str(config), "-f", str(script), "-np")
        sections = _SECTION.split(output)
        found = {number: text for number, (text, _) in self._ended.items()}
        number = -1
        for command, text in zip(sections[1::2], sections[2::2], strict=True):
            if "clusters get mark-" in command:
                number = int(command.rpartition("-")[2])
            else:
                found[number] = text.strip()
        return found

    async def _tool(self, name: str, *arguments: str) -> tuple[str, int]:
        """What it printed, and its exit code. What it keeps below the user's home is kept nowhere."""
        with tempfile.TemporaryDirectory() as home:
            process = await asyncio.create_subprocess_exec(
                self._pulsar / "bin" / name, *arguments, env={**os.environ, "PULSAR_EXTRA_OPTS": f"-Duser.home={home}"},
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                output, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
        return output.decode(), await process.wait()

    async def _handle(self, request: web.Request) -> web.Response:
        if mark := _MARK.search(request.path):
            self._current = int(mark[1])
            line = self._lines[self._current] if self._current < len(self._lines) else ""
            if line.startswith("!"):
                await self._programs.do(line)
            elif line.startswith("$"):
                text, code = await self._tool("pulsar-admin", "--admin-url", self._url, *line[1:].split())
                self._ended[self._current] = (text.strip(), code)
            await asyncio.sleep(self._pause_s)
            return web.json_response({"serviceUrl": "mark"})
        body = await request.read()
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in _OF_CONNECTION
        }
        async with self._session.request(
            request.method,
            self._service + request.raw_path,
            data=body or None,
            headers=headers,
            allow_redirects=False,
            skip_auto_headers=("content-type", "user-agent"),
        ) as response:
            answer = await response.read()
            kept = {
                name.lower(): value
                for name, value in response.headers.items()
                if name.lower() in _KEPT_HEADERS or name.lower().startswith("x-pulsar")
            }
            number = self._lines.index(_LATE[request.path]) if request.path in _LATE else self._current
            self._exchanges[number].append(
                {
                    "method": request.method,
                    "path": request.raw_path,
                    "content_type": request.headers.get("content-type", ""),
                    "body": _readable(body),
                    "status": response.status,
                    "headers": kept,
                    "answer": _readable(answer),
                }
            )
            sent = {name: value for name, value in response.headers.items() if name.lower() not in
                    (*_OF_CONNECTION, "content-encoding")}  # fmt: skip
            return web.Response(status=response.status, body=answer, headers=sent)


class Programs:
    """What programs do between the commands, by HTTP and WebSocket."""

    def __init__(self, service: str) -> None:
        self._service = service
        self.session: aiohttp.ClientSession
        self._open: list[aiohttp.ClientWebSocketResponse] = []

    async def do(self, line: str) -> None:
        what, *words = line[1:].split()
        await getattr(self, what)(*words)

    async def produce(self, topic: str, count: str, key: str = "") -> None:
        async with self.session.ws_connect(
            f"{self._service}/ws/v2/producer/{topic.replace('://', '/')}"
        ) as producer:
            for number in range(int(count)):
                message = {
                    "payload": "bWVzc2FnZQ==",
                    "properties": {"number": str(number)},
                    "context": str(number),
                }
                await producer.send_json({**message, "key": key} if key else message)
                answer = await producer.receive_json()
                if answer.get("result") != "ok":
                    raise SystemExit(f"{topic}: {answer}")

    async def subscribe(self, topic: str, subscription: str, kind: str) -> None:
        path = f"{self._service}/ws/v2/consumer/{topic.replace('://', '/')}/{subscription}?subscriptionType={kind}"
        self._open.append(await self.session.ws_connect(path))

    async def wait(self, seconds: str) -> None:
        """Until something of the service's own has ended."""
        await asyncio.sleep(float(seconds))

    async def close(self) -> None:
        for connection in self._open:
            await connection.close()
        self._open = []


def _readable(body: bytes) -> Any:
    """JSON as it is, a text otherwise."""
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body.decode(errors="backslashreplace")


def commands() -> list[str]:
    """As they are typed, with those of programs."""
    return [line for line in COMMANDS.read_text().splitlines() if line and not line.startswith("#")]
