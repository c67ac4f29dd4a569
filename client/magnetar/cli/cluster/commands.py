"""`magnetar cluster`: makes the metadata of a cluster, shows who belongs to it, and says what is to be repaired.

All of it goes to the metadata store itself, since there may be no daemon to ask. What is asked for is put where daemons
look for it: marks of bookies that are drained, and the queue of repairs.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magnetar.metadata.paths import COOKIES_PATH, KNOWN_BROKERS_PATH, known_broker_path
from magnetar.proto.errors import InvalidArgument
from magnetar.runtime.quantities import counted

from ..terminal.command import Answer, command
from ..terminal.tables import Table, text
from ..wiring.cluster_facts import bookie_facts, broker_facts, cluster_facts, ledgers_to_repair
from ..wiring.metadata import open_store, system_rng
from .drain import drain_app
from .options import STORE, Kind, Metadata
from .recover_ledger import recover_app

if TYPE_CHECKING:
    from magnetar.metadata import MetadataStore

_POLL_S = 0.2

cluster_app = typer.Typer(
    no_args_is_help=True, help="Make a cluster, see who belongs to it, repair and restart it."
)
cluster_app.add_typer(drain_app)
cluster_app.add_typer(recover_app)


@command(cluster_app, "init", json=None)
async def init(
    metadata: Metadata,
    wait: Annotated[
        float,
        typer.Option("--wait", min=0, help="How long ZooKeeper may take to come up.", metavar="SECONDS"),
    ] = 0.0,
) -> None:
    """Make the root of a cluster and its identity. A cluster that is there stays as it is."""
    from magnetar.metadata.identity import cluster_instance

    async with open_store(metadata, wait, make_root=True) as store:
        cluster = await cluster_instance(store, system_rng())
    print(f"cluster {cluster:016x} at {metadata.rpartition('@')[2]}")


@command(cluster_app, "status")
async def status(
    metadata: Metadata,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", min=0, help="How long a broker and the bookies may take to come up.", metavar="SECONDS"
        ),
    ] = 0.0,
    bookies: Annotated[
        int,
        typer.Option(
            "--bookies", min=0, help="With --wait: so many must take entries, or it fails.", metavar="N"
        ),
    ] = 1,
) -> Answer:
    """Show the brokers, the bookies and the figures of a cluster."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait
    async with open_store(metadata, wait) as store:
        while (lacking := await _lacking(store, bookies)) and loop.time() < deadline:  # noqa: ASYNC110 - many nodes
            await asyncio.sleep(_POLL_S)
        found = await cluster_facts(store)
    failure = f"after {wait:g} s the cluster has {lacking}" if lacking and wait else ""
    return Answer(found, status_of(found), failure)


@command(cluster_app, "remove", source=STORE, json=None)
async def remove(
    store: MetadataStore,
    name: Annotated[str, typer.Argument(help="Its name, as status shows it.", metavar="NAME")],
    kind: Kind = "",
) -> None:
    """Forget a stopped bookie that no ledger names any more, or a broker that is lost."""
    from magnetar.broker.ownership.draining import ClusterMember, choose
    from magnetar.broker.ownership.records import broker_path
    from magnetar.ledger.replication.operations import remove_bookie
    from magnetar.metadata.drains import BOOKIE, BROKER

    known = [
        ClusterMember(kind_of_these, one, "", False)
        for kind_of_these, path in ((BROKER, KNOWN_BROKERS_PATH), (BOOKIE, COOKIES_PATH))
        for one in await store.children(path)
    ]
    (member,) = choose(known, name, kind=kind)
    if member.kind == BOOKIE:
        await remove_bookie(store, name)
        print(f"{name} is forgotten; another bookie may have its name")
    elif await store.get(broker_path(name)) is not None:
        raise InvalidArgument(f"broker {name!r} is registered; stop it first")
    else:
        await store.delete(known_broker_path(name))
        print(f"broker {name} is forgotten")


@command(cluster_app, "recover", source=STORE, json=None)
async def recover(
    store: MetadataStore,
    bookie: Annotated[str, typer.Argument(help="Its name, as status shows it.", metavar="BOOKIE")],
) -> None:
    """Queue the ledgers of a lost bookie now, without its delay; of one that is there, what it lacks."""
    await _queue_repairs(store, bookie)


@command(cluster_app, "check", source=STORE, json=None)
async def check(store: MetadataStore) -> None:
    """Compare all ledgers with the bookies that there are, and queue what is to be repaired; runs weekly by itself."""
    await _queue_repairs(store, None)


@command(cluster_app, "rolling-restart", json=None)
async def rolling_restart(
    metadata: Metadata,
    via: Annotated[
        str,
        typer.Option("--via", help="Who runs the daemons: systemd (over ssh) or kubernetes.", metavar="NAME"),
    ] = "",
    commands: Annotated[
        list[str] | None,
        typer.Option(
            "--command",
            help="Instead: a command of the shell that restarts a daemon; several run in turn, to stop and to start it. "
            "{name}, {kind}, {host}, {port} and {zone} are the daemon's.",
            metavar="COMMAND",
        ),
    ] = None,
    ready: Annotated[
        str,
        typer.Option(
            "--ready", help="A command that succeeds when the daemon is ready, say a curl.", metavar="COMMAND"
        ),
    ] = "",
    by: Annotated[
        str,
        typer.Option(
            "--by",
            help="What is restarted together: daemon (each on its own), machine (what has one host) or zone. Refused if a "
            "ledger would be below its ack quorum.",
            metavar="WAY",
        ),
    ] = "daemon",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", help="bookie, broker, a name, or a zone or machine; may be repeated.", metavar="WHICH"
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="How long each step may take.", metavar="SECONDS")
    ] = 600.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands, and what stands in the way.")
    ] = False,
) -> None:
    """Restart the bookies, then the brokers, or zone by zone: each when all others are well and nothing waits for repair."""
    from .members import obstacles, plan, read_members, refusals
    from .restart import SUPERVISORS, Commands, restart

    if bool(via) == bool(commands) or (via and via not in SUPERVISORS):
        raise InvalidArgument(
            f"say how a daemon is restarted: --via {' or --via '.join(SUPERVISORS)}, or --command"
        )
    how = Commands(tuple(commands or SUPERVISORS[via]), ready)
    async with open_store(metadata) as store:
        members = await read_members(store)
        groups = plan(members, only or [], by)
        if dry_run:
            for group in groups:
                print("; ".join(" & ".join(lines) for lines in how.lines(group)))
            in_the_way = obstacles(members, members, await ledgers_to_repair(store))
            for obstacle in (*in_the_way, *await refusals(store, members, groups)):
                print(f"in the way: {obstacle}")
            return
        await restart(store, groups, how, timeout, partial(print, flush=True))


async def _lacking(store: MetadataStore, bookies: int) -> str:
    """What the cluster has too few of; "": of nothing."""
    writable = sum(bookie["state"] == "writable" for bookie in await bookie_facts(store))
    if writable < bookies:
        return f"{counted(writable, 'bookie that takes', 'bookies that take')} entries, and --bookies is {bookies}"
    running = [broker for broker in await broker_facts(store) if broker["state"] != "lost"]
    return "" if running else "no broker"


def status_of(found: dict[str, Any]) -> list[str | Table]:
    """What `cluster_facts` found, for people."""
    waiting = counted(found["under_replicated_ledgers"], "ledger waits", "ledgers wait")
    brokers = [
        (row["name"], row["url"], row["state"], row["zone"], text(row["load"]["bundles"]))
        for row in found["brokers"]
    ]
    bookies = [
        (
            *(bookie[name] for name in ("id", "address", "state", "zone", "rack", "group")),
            f"{bookie['free_bytes'] / 1e9:,.0f} GB" if bookie["free_bytes"] else "",
            text(bookie["damaged_ledgers"]),
        )
        for bookie in found["bookies"]
    ]
    there = f"{counted(found['ledgers'], 'ledger')}, {counted(len(brokers), 'broker')}"
    return [
        "degraded:" if found["problems"] else "ok",
        *(f"  {subject}: {reason}" for subject, reason in found["problems"].items()),
        f"cluster {found['cluster']}: {there}, balancer {found['balancer'] or 'none'}",
        f"{waiting} for repair, auditor {found['auditor'] or 'none'}",
        Table("", ("broker", "URL", "state", "zone", "bundles"), brokers, right=(4,)),
        Table(
            "",
            ("bookie", "address", "state", "zone", "rack", "group", "free", "damaged"),
            bookies,
            right=(6, 7),
        ),
    ]


async def _queue_repairs(store: MetadataStore, bookie: str | None) -> None:
    from ..wiring.service import Service, system_components
    from ..wiring.settings import SettingSources, service_settings

    settings = service_settings(SettingSources.of_process({}))
    async with Service(settings, system_components()) as service:
        repairs = await service.repairs(store, "magnetar cluster")
        if bookie is None:
            found = await repairs.full_check()
        elif bookie in (known := await store.children(COOKIES_PATH)):
            found = await repairs.recover_bookie(bookie)
        else:
            there = ", ".join(known) or "none"
            raise InvalidArgument(f"there is no bookie {bookie} in this cluster; it has {there}")
    print(f"{counted(found.ledgers, 'ledger')} looked at, {found.queued:,} queued for repair")
    if found.unreadable:
        unreadable = counted(found.unreadable, "record of a ledger", "records of ledgers")
        print(f"{unreadable} cannot be read; the log of the auditor names them")
