"""The recorded requests of `exchanges.jsonl`, sent in order over plain HTTP, and what differs from Pulsar's answers.

A row is a command of pulsar-admin with its exchanges: method, path, body, status, and the fields of the answer (`fields`). A
line that begins with "!" is what programs do between the commands.

    python -m pulsar_admin.replay golden.json        # cuts `exchanges.jsonl` down from what was recorded from a real Pulsar
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from support.admin_kit import Admin
from support.broker_kit import FakeClient

_FILE = Path(__file__).with_name("exchanges.jsonl")


def rows() -> list[dict[str, Any]]:
    """In the order in which they were recorded."""
    return [json.loads(line) for line in _FILE.read_text().splitlines()]


def fields(answer: Any) -> Any:
    """What an answer is made of: maps with the fields of each name, of lists the first element, of the rest the type.

    >>> fields({"a": [1, 2], "b": None}) == {"a": ["number"], "b": "null"}
    True
    """
    if isinstance(answer, dict):
        return {name: fields(one) for name, one in answer.items()}
    if isinstance(answer, list):
        return [fields(one) for one in answer[:1]]
    if answer is None:
        return "null"
    if isinstance(answer, bool):
        return "bool"
    return "number" if isinstance(answer, int | float) else "text"


def differences(wanted: Any, found: Any, path: str = "") -> list[str]:
    """In words; empty: none. An empty list or map fits any."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        missing = [f"{path}.{name} is missing" for name in wanted if name not in found]
        more = [f"{path}.{name} is more" for name in found if name not in wanted]
        both = [
            one
            for name in wanted
            if name in found
            for one in differences(wanted[name], found[name], f"{path}.{name}")
        ]
        return missing + more + both
    if isinstance(wanted, list) and isinstance(found, list):
        return differences(wanted[0], found[0], f"{path}[]") if wanted and found else []
    return [] if wanted == found else [f"{path} is {found}, not {wanted}"]


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

    async def close(self) -> None:
        for client in self._open:
            client.close()
        self._open = []


async def replay(admin: Admin, wanted: str = "") -> dict[str, list[str]]:
    """By command, what differs. `wanted`: a regular expression of the commands that are compared; all are sent."""
    found: dict[str, list[str]] = {}
    programs = Programs(admin)
    for row in rows():
        command = row["command"]
        if command.startswith("!"):
            await programs.do(command)
            continue
        differ: list[str] = []
        for method, path, body, status, answer in row["http"]:
            answered = await admin(method, path, body)
            if answered.status != status:
                differ.append(f"{method} {path}: {answered.status} {answered.body}, not {status}")
            elif status < 300:
                differ += [f"{method} {path}: {one}" for one in differences(answer, fields(answered.body))]
        if differ and re.search(wanted, command):
            found[command] = differ
    await programs.close()
    return found


_LONG = ("/brokers/configuration/runtime", "/broker-stats")  # answers of which only the kind is kept


def cut(recorded: str) -> str:
    """The lines of `exchanges.jsonl`, from those that were recorded: a JSON row a command."""
    lines = []
    for line in recorded.splitlines():
        row = json.loads(line)
        exchanges = [
            [one["method"], one["path"], one["body"], one["status"], _kept(one["path"], one["answer"])]
            for one in row["http"]
        ]
        if exchanges or row["command"].startswith("!"):
            lines.append(json.dumps({"command": row["command"], "http": exchanges}) + "\n")
    return "".join(lines)


def _kept(path: str, answer: Any) -> Any:
    if any(long in path for long in _LONG):
        return {} if isinstance(answer, dict) else []
    return fields(answer)


if __name__ == "__main__":
    _FILE.write_text(cut(Path(sys.argv[1]).read_text()))
