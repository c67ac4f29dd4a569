"""`magnetar cluster`: makes the metadata of a cluster, shows who belongs to it, and says what is to be repaired.

All of it goes to the metadata store itself, since there may be no daemon to ask. What is asked for is put where daemons
look for it: marks of bookies that are drained, and the queue of repairs.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magnetar.metadata.paths import COOKIES_PATH, KNOWN_BROKERS_PATH, known_broker_path
from magnetar.proto.errors import InvalidArgument

from ..terminal.command import command
from ..terminal.options import Json, Yes
from ..terminal.session import fail, print_json
from ..terminal.tables import counted, print_table, text
from ..wiring.cluster_facts import bookie_facts, broker_facts, cluster_facts, ledgers_to_repair
from ..wiring.metadata import open_store, system_rng

if TYPE_CHECKING:
    from magnetar.metadata import MetadataStore

_POLL_S = 0.2

cluster_app = typer.Typer(
    no_args_is_help=True, help="Make a cluster, see who belongs to it, repair and restart it."
)

Metadata = Annotated[
    str,
    typer.Option(
        "--metadata",
        envvar="MAGNETAR_DAEMON_METADATA",
        help="The metadata that the cluster shares: zk://host:port,host:port/root.",
        metavar="URL",
    ),
]


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


@command(cluster_app, "status", json=None)
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
    json: Json = False,
) -> None:
    """Show the brokers, the bookies and the figures of a cluster."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait
    async with open_store(metadata, wait) as store:
        while (lacking := await _lacking(store, bookies)) and loop.time() < deadline:  # noqa: ASYNC110 - many nodes
            await asyncio.sleep(_POLL_S)
        found = await cluster_facts(store)
    if json:
        print_json(found)
    else:
        _print_status(found)
    if lacking and wait:
        fail(f"after {wait:g} s the cluster has {lacking}")


Kind = Annotated[
    str, typer.Option("--kind", help="broker or bookie, where one of each has the name.", metavar="KIND")
]


@command(cluster_app, "drain", json=None)
async def drain(
    metadata: Metadata,
    name: Annotated[
        str, typer.Argument(help="A broker or a bookie, as status shows it.", metavar="[NAME]")
    ] = "",
    zone: Annotated[
        str, typer.Option("--zone", help="Instead: all brokers and bookies of a zone.", metavar="ZONE")
    ] = "",
    kind: Kind = "",
    undo: Annotated[
        bool, typer.Option("--undo", help="Take it back; what was moved stays where it is.")
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait", min=0, help="Return after so long; without it when all has moved.", metavar="SECONDS"
        ),
    ] = None,
) -> None:
    """Move all that a broker or a bookie has to the others, so that it can be stopped; it gets nothing new until --undo.

    Ctrl-C ends the command alone: the same again follows what is under way, and --undo takes it back.
    """
    from . import drain as cluster_drain

    await cluster_drain.drain(metadata, name, zone=zone, kind=kind, undo=undo, wait_s=wait)


Bookie = Annotated[str, typer.Argument(help="Its name, as status shows it.", metavar="BOOKIE")]


@command(cluster_app, "remove", json=None)
async def remove(
    metadata: Metadata,
    name: Annotated[str, typer.Argument(help="Its name, as status shows it.", metavar="NAME")],
    kind: Kind = "",
) -> None:
    """Forget a stopped bookie that no ledger names any more, or a broker that is lost."""
    from magnetar.broker.ownership.draining import ClusterMember, choose
    from magnetar.broker.ownership.records import broker_path
    from magnetar.ledger.replication.operations import remove_bookie
    from magnetar.metadata.drains import BOOKIE, BROKER

    async with open_store(metadata, 0.0) as store:
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


@command(cluster_app, "recover", json=None)
async def recover(metadata: Metadata, bookie: Bookie) -> None:
    """Queue the ledgers of a lost bookie now, without its delay; of one that is there, what it lacks."""
    await _queue_repairs(metadata, bookie)


@command(cluster_app, "recover-ledger")
async def recover_ledger(
    ledger: Annotated[int, typer.Argument(help="The id of a ledger.", metavar="LEDGER", min=0)],
    metadata: Annotated[
        str,
        typer.Option(
            "--metadata",
            envvar="MAGNETAR_DAEMON_METADATA",
            help="The metadata that a cluster shares.",
            metavar="URL",
        ),
    ] = "",
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Instead: data of a standalone service, or of a broker; it is stopped.",
            metavar="DIR",
        ),
    ] = "",
    bookies: Annotated[
        str,
        typer.Option(
            "--bookies", help="With --data of a broker: its bookies, as it has them.", metavar="LIST"
        ),
    ] = "",
    accept_loss: Annotated[
        int | None,
        typer.Option(
            "--accept-loss",
            min=-1,
            help="Where the end cannot be proved: close it after this entry, the last one that is proved, and give up what "
            "may have followed.",
            metavar="ENTRY",
        ),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="Settings in TOML.", metavar="FILE")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="As a daemon takes it.", metavar="SECTION.NAME=VALUE")
    ] = None,
    yes: Yes = False,
    as_json: bool = False,
) -> None:
    """Close an open ledger now. Its writer, if there is one, is shut out.

    When its end cannot be proved, this shows what each bookie knows of it, and how to accept the loss.
    """
    from .recover_ledger import Place, recover

    listed = [one.strip() for one in bookies.split(",") if one.strip()]
    place = Place(metadata, data, listed, config, assignments or [])
    await recover(place, ledger, accept_loss=accept_loss, yes=yes, as_json=as_json)


@command(cluster_app, "check", json=None)
async def check(metadata: Metadata) -> None:
    """Compare all ledgers with the bookies that there are, and queue what is to be repaired; runs weekly by itself."""
    await _queue_repairs(metadata, None)


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
    async with open_store(metadata, 0.0) as store:
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


async def _check_known(store: MetadataStore, bookie: str) -> None:
    known = await store.children(COOKIES_PATH)
    if bookie not in known:
        raise InvalidArgument(
            f"there is no bookie {bookie} in this cluster; it has {', '.join(known) or 'none'}"
        )


async def _lacking(store: MetadataStore, bookies: int) -> str:
    """What the cluster has too few of; "": of nothing."""
    writable = sum(bookie["state"] == "writable" for bookie in await bookie_facts(store))
    if writable < bookies:
        return f"{counted(writable, 'bookie that takes', 'bookies that take')} entries, and --bookies is {bookies}"
    running = [broker for broker in await broker_facts(store) if broker["state"] != "lost"]
    return "" if running else "no broker"


def _print_status(found: dict[str, Any]) -> None:
    print("degraded:" if found["problems"] else "ok")
    for subject, reason in found["problems"].items():
        print(f"  {subject}: {reason}")
    print(
        f"cluster {found['cluster']}: {counted(found['ledgers'], 'ledger', 'ledgers')}, "
        f"{counted(len(found['brokers']), 'broker', 'brokers')}, balancer {found['balancer'] or 'none'}"
    )
    waiting = counted(found["under_replicated_ledgers"], "ledger waits", "ledgers wait")
    print(f"{waiting} for repair, auditor {found['auditor'] or 'none'}")
    print_table(
        "",
        ("broker", "URL", "state", "zone", "bundles"),
        [
            (row["name"], row["url"], row["state"], row["zone"], text(row["load"]["bundles"]))
            for row in found["brokers"]
        ],
        right=(4,),
    )
    rows = [
        (
            bookie["id"],
            bookie["address"],
            bookie["state"],
            bookie["zone"],
            bookie["rack"],
            bookie["group"],
            f"{bookie['free_bytes'] / 1e9:,.0f} GB" if bookie["free_bytes"] else "",
            text(bookie["damaged_ledgers"]),
        )
        for bookie in found["bookies"]
    ]
    print_table(
        "",
        ("bookie", "address", "state", "zone", "rack", "group", "free", "damaged"),
        rows,
        right=(6, 7),
    )


async def _queue_repairs(metadata: str, bookie: str | None) -> None:
    from ..wiring.components import broker_components
    from ..wiring.settings import SettingSources, service_settings
    from ..wiring.shared_metadata import open_repairs

    async with open_store(metadata, 0.0) as store, AsyncExitStack() as stops:
        settings = service_settings(SettingSources.of_process({}))
        repairs = await open_repairs(settings, broker_components(), store, "magnetar cluster", stops)
        if bookie is None:
            found = await repairs.full_check()
        else:
            await _check_known(store, bookie)
            found = await repairs.recover_bookie(bookie)
    print(f"{counted(found.ledgers, 'ledger', 'ledgers')} looked at, {found.queued:,} queued for repair")
    if found.unreadable:
        unreadable = counted(found.unreadable, "record of a ledger", "records of ledgers")
        print(f"{unreadable} cannot be read; the log of the auditor names them")
