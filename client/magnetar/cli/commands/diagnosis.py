"""`magnetar doctor`: what is wrong with a service or a cluster. `magnetar top`: who is busy there, as it goes on.

Each broker is asked for what it serves itself; what several of them say is shown once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.quantities import about, about_bytes, counted

from ..terminal.command import Answer, command
from ..terminal.session import connected, print_json
from ..terminal.tables import Table, rich_table, show, text

if TYPE_CHECKING:
    from magnetar.client import Client

    Ask = Callable[[Client], Awaitable[dict[str, Any]]]

diagnosis_app = typer.Typer()
_CLOCK_S = 1.0  # clocks that are further apart are named
_RANK = {"critical": 0, "warning": 1}


async def of_each(client: Client, ask: Ask) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What each broker answers, by name; and why others do not. The only one is asked where it was reached."""
    brokers = [row for row in await client.admin.brokers() if row["state"] != "lost"]
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}

    async def one(row: dict[str, Any]) -> None:
        try:
            if len(brokers) == 1:
                found[row["name"]] = await ask(client)
            else:
                async with connected(row["url"]) as there:
                    found[row["name"]] = await ask(there)
        except MagnetarError as error:
            failed[row["name"]] = error.message

    await asyncio.gather(*map(one, brokers))
    return dict(sorted(found.items())), failed


async def _diagnosed(client: Client) -> dict[str, Any]:
    """With how far the broker's clock is ahead of this machine's, in seconds, at least."""
    before = time.time()
    found = await client.admin.diagnose()
    after = time.time()
    there = found["now_ms"] / 1000
    found["ahead_s"] = there - after if there > after else min(there - before, 0.0)
    return found


def _finding(severity: str, subject: str, cause: str, consequence: str, cure: str) -> dict[str, str]:
    names = ("severity", "subject", "cause", "consequence", "cure")
    return dict(zip(names, (severity, subject, cause, consequence, cure), strict=True))


def _of_the_cluster(found: dict[str, dict[str, Any]], failed: dict[str, str]) -> Iterable[dict[str, str]]:
    """What is seen only beside the others."""
    for name, error in failed.items():
        yield _finding(
            "critical", f"broker {name}", f"it is registered and does not answer: {error}",
            "the clients of its topics wait", "look at its process and at the network to it; start it again",
        )  # fmt: skip
    for name, one in found.items():
        if abs(one["ahead_s"]) > _CLOCK_S:
            apart = f"{about(abs(one['ahead_s']))} {'ahead of' if one['ahead_s'] > 0 else 'behind'} this machine's"
            yield _finding(
                "warning", f"broker {name}", f"its clock is {apart}", "publish times, delivery times and expiry go by it",
                "let both machines follow a time server (chronyd, systemd-timesyncd)",
            )  # fmt: skip
    settings = [(name, one["settings"]) for name, one in found.items()]
    for setting in settings[0][1] if settings else ():
        values = {name: own.get(setting) for name, own in settings}
        if len(set(map(str, values.values()))) > 1:
            shown = ", ".join(f"{value} at {name}" for name, value in values.items())
            yield _finding(
                "warning", "settings of the brokers", f"broker.{setting} is {shown}",
                "what holds for a topic changes when it moves to another broker", "give all brokers the same value",
            )  # fmt: skip


@command(diagnosis_app, "doctor", "Operate")
async def doctor(client: Client) -> Answer:
    """Say what is wrong with the service or the cluster: why, what follows, what mends it. Ends with 1 if anything is."""
    found, failed = await of_each(client, _diagnosed)
    rows = [*_of_the_cluster(found, failed), *(row for one in found.values() for row in one["findings"])]
    once = {(row["subject"], row["cause"]): row for row in rows}
    for name, one in found.items():  # what its health says of it to all others as well
        for row in one["findings"]:
            if (f"broker {name}, {row['subject']}", row["cause"]) in once:
                once.pop((row["subject"], row["cause"]), None)
    findings = sorted(once.values(), key=lambda row: _RANK.get(row["severity"], 2))
    topics = sum(one["topics"] for one in found.values())
    looked = f"{counted(len(found), 'broker')} and {counted(topics, 'loaded topic')} were looked at"
    value = {"brokers": len(found), "topics": topics, "findings": findings}
    if not findings:
        return Answer(
            value, [f"nothing is wrong: {looked} (a consumer that stands still is named after a minute)"]
        )
    alike: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in findings:
        alike.setdefault((row["severity"], row["consequence"], row["cure"]), []).append(row)
    return Answer(
        value, [*map(_shown, alike.values()), f"{counted(len(findings), 'finding')}; {looked}"], code=1
    )


def _shown(alike: list[dict[str, str]]) -> str:
    """Findings of which the same follows, and which the same mends."""
    lines = [f"{row['severity'].upper()}  {row['subject']}\n  {row['cause']}" for row in alike]
    lines += [
        f"  {word}:  {alike[0][name]}"
        for word, name in (("so", "consequence"), ("do", "cure"))
        if alike[0][name]
    ]
    return "\n".join(lines) + "\n"


# --- top ---------------------------------------------------------------------------------------------------------------


@command(diagnosis_app, "top", "Operate", json=None)
async def top(
    client: Client,
    count: Annotated[
        int, typer.Option("-n", "--count", min=1, max=100, help="Rows of a table.", metavar="ROWS")
    ] = 10,
    interval: Annotated[
        float, typer.Option("--interval", min=0.2, help="Between two looks.", metavar="SECONDS")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One look, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each look.")] = False,
) -> None:
    """Show the busiest topics, the largest backlogs, the slowest consumers and the bookies, until Ctrl-C."""

    async def look() -> dict[str, Any]:
        found, failed = await of_each(client, lambda there: there.admin.busiest(count))
        return {
            "brokers": [
                {**one["totals"], "broker": name, "topics": one["topics"], "connections": one["connections"]}
                for name, one in found.items()
            ],
            "failed": failed,
            "topics": _first(count, found, "busiest_topics", ("message_rate_in", "message_rate_out")),
            "subscriptions": _first(count, found, "largest_backlogs", ("backlog_messages",)),
            "bookies": await client.admin.bookies(),
        }

    if as_json or once:
        while True:
            seen = await look()
            print_json(seen) if as_json else show(*_tables(seen))
            if once:
                return
            await asyncio.sleep(interval)
    from rich.live import Live

    with Live(_page(await look()), screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval)
            live.update(_page(await look()), refresh=True)


def _first(
    count: int, found: dict[str, dict[str, Any]], what: str, by: tuple[str, ...]
) -> list[dict[str, Any]]:
    rows = [row for one in found.values() for row in one[what]]
    return sorted(rows, key=lambda row: -sum(row[name] for name in by))[:count]


def _short(topic: str) -> str:
    return topic.removeprefix("persistent://public/default/").removeprefix("persistent://")


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}"


def _of(field: str, form: Callable[[Any], str] = text) -> Callable[[dict[str, Any]], str]:
    return lambda row: form(row[field]) if field in row else ""


BOOKIE_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "bookie": _of("name"),
    "address": _of("address"),
    "state": lambda row: "writable" if row["writable"] else row["reason"].partition(" (")[0],
    "free": lambda row: about_bytes(row["free_bytes"]) if row["free_bytes"] else "",
    "zone": _of("zone"),
}
_FLOW: Final = {
    "in/s": _of("message_rate_in", _rate), "out/s": _of("message_rate_out", _rate),
    "bytes in/s": _of("byte_rate_in", about_bytes), "bytes out/s": _of("byte_rate_out", about_bytes),
}  # fmt: skip
# Title, which rows, what stands in each column, which columns are aligned to the right.
_TABLES: Final = (
    ("brokers", "brokers", {
        "broker": _of("broker"), **_FLOW, "topics": _of("topics"), "connections": _of("connections"),
        "trouble": _of("trouble"),
    }, (1, 2, 3, 4, 5, 6)),
    ("busiest topics", "topics", {
        "topic": _of("topic", _short), **_FLOW, "stored": _of("stored_bytes", about_bytes), "producers": _of("producers"),
        "consumers": _of("consumers"),
    }, (1, 2, 3, 4, 5, 6, 7)),
    ("largest backlogs", "subscriptions", {
        "subscription": _of("subscription"), "topic": _of("topic", _short), "backlog": _of("backlog_messages"),
        "oldest": lambda row: about(row["oldest_ms"] / 1000) if row["backlog_messages"] else "",
        "out/s": _of("message_rate_out", _rate), "acked/s": _of("acknowledge_rate", _rate),
        "holds most unacknowledged":
            lambda row: f"{row['slowest_consumer']} ({row['unacked_messages']:,})" if row["slowest_consumer"] else "",
    }, (2, 3, 4, 5)),
    ("bookies", "bookies", BOOKIE_COLUMNS, (3,)),
)  # fmt: skip


def _tables(seen: dict[str, Any]) -> list[Table]:
    silent = [{"broker": name, "trouble": reason} for name, reason in seen["failed"].items()]
    seen = {**seen, "brokers": [*seen["brokers"], *silent]}
    return [
        Table(
            title,
            tuple(columns),
            [tuple(cell(row) for cell in columns.values()) for row in seen[what]],
            right,
        )
        for title, what, columns, right in _TABLES
    ]


def _page(seen: dict[str, Any]) -> Any:
    from rich.console import Group

    return Group(*(rich_table(table) for table in _tables(seen)))
