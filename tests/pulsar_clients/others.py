"""Pulsar's Java client, its Go client and its command lines: programs that print what they saw as `runner` does.

Each is called with the URL of the service, that of its administration, what tells the run from others, and names of
scenarios. An id is an object with the fields of `program.Id`. Node's package is not among them: installed from npm, it
downloads its library from elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pulsar_admin.distribution import VERSION, Missing, distribution
from pulsar_clients.golden import Rows
from pulsar_clients.program import Id, comparable

_HERE = Path(__file__).parent
GO = "pulsar-client-go-0.14.0"


class Other(NamedTuple):
    """`name`: of the golden file; `command`: makes what is to be called, in a folder."""

    name: str
    command: Callable[[Path], list[str]]


def _java(folder: Path) -> list[str]:
    libraries = f"{distribution(folder)}/lib/*"
    if not shutil.which("javac"):
        raise Missing("there is no `javac` here; its scenarios need a JDK, 17 or newer")
    classes = folder.resolve() / "classes"
    _made(
        [
            "javac",
            "-nowarn",
            "-proc:none",
            "-d",
            str(classes),
            "-cp",
            libraries,
            *map(str, _HERE.glob("java/*.java")),
        ]
    )
    return [
        "java",
        "-Xmx1g",
        f"-Dlog4j.configurationFile={_HERE}/java/log4j2.xml",
        "-cp",
        f"{classes}:{libraries}",
        "Main",
    ]


def _go(folder: Path) -> list[str]:
    if not shutil.which("go"):
        raise Missing("there is no `go` here, 1.22 or newer")
    program = folder.resolve() / "go-scenarios"
    _made(["go", "build", "-o", str(program), "."], _HERE / "go")
    return [str(program)]


def _tools(folder: Path) -> list[str]:
    return [sys.executable, "-m", "pulsar_clients.tools", str(distribution(folder))]


def _made(command: list[str], folder: Path = _HERE) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"`{' '.join(command[:2])}` failed: {done.stderr.strip()[-500:]}")


OTHERS = (
    Other(f"pulsar-client-java-{VERSION}", _java),
    Other(GO, _go),
    Other(f"pulsar-tools-{VERSION}", _tools),
)


def available(folder: Path, chosen: str) -> Iterator[tuple[Other, list[str]]]:
    """Those that can run here, with what is to be called, if their names contain `chosen`. What is missing is said."""
    for one in OTHERS:
        if chosen not in one.name:
            continue
        try:
            yield one, one.command(folder)
        except Missing as error:
            sys.stdout.write(f"{one.name}: skipped: {error}\n")


async def saw(command: Sequence[str], url: str, http: str, log: Path, names: Sequence[str]) -> Rows:
    """What it sees of a service, by scenario."""
    rows: Rows = {}
    with log.open("a") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, url, http, secrets.token_hex(3), *names, limit=1 << 22,
            env={**os.environ, "PYTHONPATH": str(_HERE.parent)}, stdout=asyncio.subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        assert process.stdout is not None
        async for line in process.stdout:
            row = json.loads(line, object_hook=_id)
            name = row.pop("scenario")
            rows[name] = {what: comparable(one) for what, one in row.items()}
        await process.wait()
    return rows


def _id(found: dict[str, Any]) -> Any:
    return Id(**found) if found.keys() == set(Id._fields) else found
