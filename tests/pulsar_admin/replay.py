"""The recorded requests of `exchanges.jsonl`, sent in order over plain HTTP, and what differs from Pulsar's answers."""

from __future__ import annotations

import re

from pulsar_admin import golden
from support.admin_kit import Admin
from support.broker_kit import FakeClient

# In paths, for what is of one run.
_PLACES = {"/TIME": "/0", "HOST": "localhost:3181"}


class Programs:
    """What programs do between the commands."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._open: list[FakeClient] = []
        self._sent = 0

    async def do(self, line: str) -> None:
        what, *words = line[1:].split()
        await getattr(self, what)(*words)

    async def produce(self, topic: str, count: str, key: str = "") -> None:
        client = FakeClient(self._admin.broker)
        await client.producer(topic=topic)
        for number in range(int(count)):
            client.publish(b"message", first=number)
            wanted = number + 1
            await client.until(lambda: len(client.receipts) >= wanted)  # noqa: B023
        client.close()

    async def subscribe(self, topic: str, subscription: str, kind: str) -> None:
        client = FakeClient(self._admin.broker)
        await client.consumer(subscription=subscription, topic=topic, type=kind.lower())
        self._open.append(client)

    async def wait(self, seconds: str) -> None:
        """Not here: fields are compared, not what they say."""

    async def close(self) -> None:
        for client in self._open:
            client.close()
        self._open = []


async def replay(admin: Admin, wanted: str = "") -> dict[str, list[str]]:
    """By command, what differs. `wanted`: a regular expression of the commands that are compared; all are sent."""
    found: dict[str, list[str]] = {}
    programs = Programs(admin)
    for row in golden.rows():
        command = row["command"].removeprefix("$ ")
        if command.startswith("!"):
            await programs.do(command)
            continue
        differ: list[str] = []
        for method, path, body, status, answer in row["http"]:
            for name, place in _PLACES.items():
                path = path.replace(name, place)
            answered = await admin(method, path, body)
            found_fields = golden.answered(path, answered.body)
            differ += golden.exchanged(
                f"{method} {path}", status, answer, answered.status, found_fields, answered.body
            )
        if differ and re.search(wanted, command):
            found[command] = differ
    await programs.close()
    return found
