"""Pulsar's clients against a Magnetar of one process: `make test-pulsar`.

Each Python client runs every scenario of `scenarios`, `others` have their own. What a client saw is compared with what it
saw of a real Pulsar, as `golden/*.json` keep it. What differs must stand in the table `known.KNOWN`. The last lines count;
the exit code is 1 where something is unexplained, or where the table explains what does not differ.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import platform
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.service_process import ServiceProcess

import pulsar_clients.scenarios  # noqa: F401 - registers them
from pulsar_admin.distribution import VERSION, Missing, distribution, standalone
from pulsar_admin.known import explained
from pulsar_clients import golden, others
from pulsar_clients.golden import FIRST, Row, Rows
from pulsar_clients.known import KNOWN
from pulsar_clients.program import SCENARIOS, SLOW
from support.service import holding_port

_TESTS = Path(__file__).parents[1]
_ATTEMPTS = 5  # of a client whose library ends the process
# Of the Pulsar that is recorded: as durable as Magnetar, and with what is off by default, but clients can ask for.
_SETTINGS = {
    "acknowledgmentAtBatchIndexLevelEnabled": "true",
    "journalSyncData": "true",
}


# What a client sees of a service, by scenario: its URL, that of its administration, a log, names of scenarios.
Saw = Callable[[str, str, Path, Sequence[str]], Awaitable[Rows]]


class Client(NamedTuple):
    """`name`: of the golden file; `kind`: of `runner`."""

    name: str
    kind: str
    python: str


def clients(older: str) -> list[Client]:
    """`older`: the Python of an environment with version 3.7.0."""
    return [
        Client(FIRST, "blocking", sys.executable),
        Client(f"{FIRST}-asyncio", "asyncio", sys.executable),
        Client("pulsar-client-3.7.0", "blocking", older),
    ]


async def saw(client: Client, url: str, http: str, log: Path, names: Sequence[str] = ()) -> Rows:
    """What a client sees of a service, by scenario. Long ones have a process of their own, which others do not end."""
    wanted = set(names or SCENARIOS)
    parts = (sorted(one) for one in (wanted & SLOW, wanted - SLOW) if one)
    found = await asyncio.gather(*(_saw(client, url, http, log, part) for part in parts))
    return {name: row for rows in found for name, row in rows.items()}


async def _saw(client: Client, url: str, http: str, log: Path, wanted: list[str]) -> Rows:
    """Those whose process ended are tried again in another one."""
    rows: Rows = {}
    for _ in range(_ATTEMPTS):
        process = await asyncio.create_subprocess_exec(
            client.python, "-m", "pulsar_clients.runner", "--client", client.kind, "--url", url, "--http", http,
            "--run", secrets.token_hex(3), "--log", str(log), *wanted,
            env={**os.environ, "PYTHONPATH": str(_TESTS)}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        async for line in process.stdout:
            row = json.loads(line)
            rows[row.pop("scenario")] = row
        await process.wait()
        if not (wanted := [name for name in wanted if name not in rows]):
            break
    for row in rows.values():
        row.pop("took_s", None)
    return rows


def _all(folder: Path, older: str, chosen: str) -> Iterator[tuple[str, Saw]]:
    """All clients whose names contain `chosen`."""
    for client in clients(older):
        if chosen in client.name:
            yield client.name, functools.partial(saw, client)
    for other, command in others.available(folder, chosen):
        yield other.name, functools.partial(others.saw, command)


async def judged(
    client: str, see: Saw, url: str, http: str, log: Path, names: Sequence[str] = ()
) -> tuple[Rows, Rows]:
    """What it saw, beside what it is to see. What nothing explains is tried once more: the machine may have been busy."""
    recorded = golden.read(client)
    wanted = {name: recorded[name] for name in names or recorded if name in recorded}
    if not wanted:
        return {}, {}
    rows = await see(url, http, log, list(wanted))
    if again := [name for name, row in wanted.items() if _unexplained(name, row, rows)]:
        sys.stdout.write(f"{client}: once more: {', '.join(again)}\n")
        rows |= await see(url, http, log, again)
    return wanted, rows


@contextlib.contextmanager
def magnetar(data: Path) -> Iterator[tuple[str, str]]:
    """A service of one process; its addresses for Pulsar's clients and for HTTP."""
    with holding_port() as port, ServiceProcess(data, ports={"pulsar": port}) as service:
        yield f"pulsar://{service.host}:{port}", f"http://{service.host}:{service.ports['http']}"


def record(pulsar: Path, older: str, chosen: str, names: Sequence[str]) -> int:
    """Writes the golden files, or `names` of them, from a Pulsar standalone: of each client what it saw twice."""
    made = {
        "by": "make record-pulsar",
        "pulsar": VERSION,
        "settings": _SETTINGS,
        "python": platform.python_version(),
    }
    refused = 0
    running = standalone(distribution(pulsar), **_SETTINGS)
    with tempfile.TemporaryDirectory() as folder, running as (http, url):
        for client, see in _all(pulsar, older, chosen):

            async def once(see: Saw = see) -> Rows:
                return await see(url, http, Path(folder, "log"), names)

            one, two = (asyncio.run(once()) for _ in range(2))
            for name in list(one):
                if "failed" in one[name] or one[name] != two.get(name):
                    refused += 1
                    sys.stdout.write(f"{client}: {name}: {one.pop(name)}\n    then {two.get(name)}\n")
            golden.write(client, made, golden.read(client) | one if names else one)
            sys.stdout.write(f"{client}: {len(one)} scenarios are recorded\n")
    return int(bool(refused))


def test(pulsar: Path, older: str, chosen: str, names: Sequence[str]) -> int:
    """Compares Magnetar with them: with the Python clients at once, then with the others one by one."""
    used: Counter[str] = Counter()
    unexplained = 0
    given = list(_all(pulsar, older, chosen))
    of_python = [one for one in given if one[0] in {client.name for client in clients(older)}]
    with tempfile.TemporaryDirectory() as folder, magnetar(Path(folder, "data")) as (url, http):

        async def compared() -> list[tuple[Rows, Rows]]:
            def judge(client: str, see: Saw) -> Awaitable[tuple[Rows, Rows]]:
                return judged(client, see, url, http, Path(folder, client), names)

            found = await asyncio.gather(*(judge(*one) for one in of_python))
            return [*found, *[await judge(*one) for one in given[len(of_python) :]]]

        found = asyncio.run(compared())
    for (client, _), both in zip(given, found, strict=True):
        text, rest = report(client, *both, used)
        sys.stdout.write(text)
        unexplained += rest
    partial = names or len(given) < len(clients(older)) + len(others.OTHERS)
    stale = [] if partial else [row for row in KNOWN if not used[row.what]]
    for row in stale:
        sys.stdout.write(f"known.py explains what does not differ: {row.what}\n")
    return int(bool(unexplained or stale))


def _differences(wanted: Row, found: Row | None) -> list[str]:
    return golden.compared(wanted, found or {"failed": "the process ended"})


def _unexplained(name: str, wanted: Row, rows: Rows) -> bool:
    return any(explained(name, one, KNOWN) is None for one in _differences(wanted, rows.get(name)))


def report(client: str, wanted: Rows, rows: Rows, used: Counter[str]) -> tuple[str, int]:
    """What differs, in words, and how many scenarios nothing explains. `used` counts the rows that explain."""
    counts: Counter[str] = Counter()
    text = ""
    for name, row in wanted.items():
        differ = _differences(row, rows.get(name))
        rest = []
        for one in differ:
            if known := explained(name, one, KNOWN):
                used[known.what] += 1
            else:
                rest.append(one)
        counts["unexplained" if rest else "known" if differ else "same"] += 1
        text += "".join(f"{client}: {name}{one[:600]}\n" for one in rest[:8])
    text += (
        f"{client}: {counts.total()} scenarios, {counts['same']} the same, {counts['known']} differ as the table says, "
        f"{counts['unexplained']} unexplained\n"
    )
    return text, counts["unexplained"]


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["record", "test"])
    parser.add_argument("folder", type=Path, help="where Pulsar's distribution is, or comes to be")
    parser.add_argument("older", help="the Python of an environment with pulsar-client 3.7.0")
    parser.add_argument("names", nargs="*", help="of scenarios; none: all")
    parser.add_argument("--client", default="", help="those whose names contain it")
    given = parser.parse_args(None if arguments is None else list(arguments))
    try:
        return (test if given.what == "test" else record)(
            given.folder, given.older, given.client, given.names
        )
    except Missing as error:
        sys.stdout.write(f"make {given.what}-pulsar: skipped: {error}\n")
        return 0


if __name__ == "__main__":
    sys.exit(main())
