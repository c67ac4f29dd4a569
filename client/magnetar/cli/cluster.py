"""`magnetar cluster`: makes the metadata of a cluster, shows who belongs to it, and says what is to be repaired.

All of it goes to the metadata store itself, since there may be no daemon to ask. What is asked for is put where daemons
look for it: marks of bookies that are drained, and the queue of repairs.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any

import msgpack
import typer

from .cluster_store import open_store
from .options import Json, Yes

if TYPE_CHECKING:
    from magnetar.metadata import MetadataStore

_POLL_S = 0.2
_TIMEOUT_S = 10.0

cluster_app = typer.Typer(no_args_is_help=True, help="Make a cluster, and see who belongs to it.")

Metadata = Annotated[
    str,
    typer.Option(
        "--metadata",
        envvar="MAGNETAR_DAEMON_METADATA",
        help="The metadata that the cluster shares: zk://host:port,host:port/root.",
        metavar="URL",
    ),
]


@cluster_app.command()
def init(
    metadata: Metadata,
    wait: Annotated[
        float,
        typer.Option("--wait", min=0, help="How long ZooKeeper may take to come up.", metavar="SECONDS"),
    ] = 0.0,
) -> None:
    """Make the root of a cluster and its identity. A cluster that is there stays as it is."""
    from .session import run

    run(_init(metadata, wait))


@cluster_app.command()
def status(
    metadata: Metadata,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", min=0, help="How long a broker and the bookies may take to come up.", metavar="SECONDS"
        ),
    ] = 0.0,
    bookies: Annotated[
        int, typer.Option("--bookies", min=0, help="With --wait: this many take entries.", metavar="N")
    ] = 1,
    json: Json = False,
) -> None:
    """Show the bookies, the broker and the figures of a cluster."""
    from .session import run

    run(_status(metadata, wait, bookies, as_json=json))


Bookie = Annotated[str, typer.Argument(help="The id of a bookie, as status shows it.", metavar="BOOKIE")]


@cluster_app.command()
def drain(
    metadata: Metadata,
    bookie: Bookie,
    undo: Annotated[
        bool, typer.Option("--undo", help="Take it back; what was moved stays where it is.")
    ] = False,
) -> None:
    """Move all ledgers of a bookie to others, so that it can be taken away. It serves them until then.

    Asked again, it says how far that is.
    """
    from .session import run

    run(_drain(metadata, bookie, undo=undo))


@cluster_app.command()
def remove(metadata: Metadata, bookie: Bookie) -> None:
    """Forget a stopped bookie that no ledger names any more."""
    from .session import run

    run(_remove(metadata, bookie))


@cluster_app.command()
def recover(metadata: Metadata, bookie: Bookie) -> None:
    """Queue the ledgers of a lost bookie now, without its delay; of one that is there, what it lacks."""
    from .session import run

    run(_recover(metadata, bookie))


@cluster_app.command("recover-ledger")
def recover_ledger(
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
    as_json: Json = False,
) -> None:
    """Close an open ledger now. Its writer, if there is one, is shut out.

    When its end cannot be proved, this shows what each bookie knows of it, and how to accept the loss.
    """
    from .cluster_ledger import Place, recover_ledger
    from .session import run

    listed = [one.strip() for one in bookies.split(",") if one.strip()]
    place = Place(metadata, data, listed, config, assignments or [])
    run(recover_ledger(place, ledger, accept_loss=accept_loss, yes=yes, as_json=as_json))


@cluster_app.command()
def check(metadata: Metadata) -> None:
    """Compare all ledgers with the bookies that there are, and queue what is to be repaired; runs weekly by itself."""
    from .session import run

    run(_recover(metadata, None))


async def _init(address: str, wait_s: float) -> None:
    from magnetar.metadata.identity import cluster_instance

    from .production import system_rng

    async with open_store(address, wait_s, make_root=True) as store:
        cluster = await cluster_instance(store, system_rng())
    print(f"cluster {cluster:016x} at {address.rpartition('@')[2]}")


async def _drain(address: str, bookie: str, *, undo: bool) -> None:
    from magnetar.ledger.replication import begin_drain, cancel_drain, drain_progress
    from magnetar.runtime.clock import SystemClock

    async with open_store(address, 0.0) as store:
        if undo:
            changed = await cancel_drain(store, bookie)
            print(f"{bookie} is not drained any more" if changed else f"{bookie} was not drained")
            return
        await begin_drain(store, bookie)
        progress = await drain_progress(store, bookie, SystemClock())
    if not progress.ledgers:
        print(f"no ledger names {bookie}: stop it, then magnetar cluster remove {bookie}")
        return
    print(
        f"{progress.ledgers:,} ledgers name {bookie}; {progress.open_ledgers:,} are open and wait for their writers"
    )
    for ledger_id, note in progress.notes.items():
        print(f"ledger {ledger_id}: {note}")


async def _remove(address: str, bookie: str) -> None:
    from magnetar.ledger.replication import remove_bookie

    async with open_store(address, 0.0) as store:
        await _check_known(store, bookie)
        await remove_bookie(store, bookie)
    print(f"{bookie} is forgotten; another bookie may have its name")


async def _recover(address: str, bookie: str | None) -> None:
    from .production import broker_components
    from .settings import SettingSources, service_settings
    from .shared_metadata import open_repairs

    async with open_store(address, 0.0) as store, AsyncExitStack() as stops:
        settings = service_settings(SettingSources.of_process({}))
        repairs = await open_repairs(settings, broker_components(), store, "magnetar cluster", stops)
        if bookie is None:
            found = await repairs.full_check()
        else:
            await _check_known(store, bookie)
            found = await repairs.recover_bookie(bookie)
    print(f"{found.ledgers:,} ledgers looked at, {found.queued:,} queued for repair")
    if found.unreadable:
        print(f"{found.unreadable:,} records of ledgers cannot be read; the log of the auditor names them")


async def _check_known(store: MetadataStore, bookie: str) -> None:
    from magnetar.metadata.paths import COOKIES_PATH
    from magnetar.proto.errors import InvalidArgument

    known = await store.children(COOKIES_PATH)
    if bookie not in known:
        raise InvalidArgument(
            f"there is no bookie {bookie} in this cluster; it has {', '.join(known) or 'none'}"
        )


async def _status(address: str, wait_s: float, bookies: int, *, as_json: bool) -> None:
    from .session import print_json

    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    async with open_store(address, wait_s) as store:
        while True:
            found = await cluster_facts(store)
            writable = sum(bookie["state"] == "writable" for bookie in found["bookies"])
            if (found["broker"] and writable >= bookies) or loop.time() >= deadline:
                break
            await asyncio.sleep(_POLL_S)
    if as_json:
        print_json(found)
        return
    from .tables import print_table, text

    print(f"cluster {found['cluster']}: {text(found['ledgers'])} ledgers, broker {found['broker'] or 'none'}")
    print(
        f"{text(found['under_replicated_ledgers'])} ledgers wait for repair, auditor {found['auditor'] or 'none'}"
    )
    rows = [
        (
            bookie["id"],
            bookie["address"],
            bookie["state"],
            bookie["zone"],
            bookie["rack"],
            f"{bookie['free_bytes'] / 1e9:,.0f} GB" if bookie["free_bytes"] else "",
            text(bookie["damaged_ledgers"]),
        )
        for bookie in found["bookies"]
    ]
    print_table(
        "", ("bookie", "address", "state", "zone", "rack", "free", "damaged ledgers"), rows, right=(5, 6)
    )


async def cluster_facts(store: MetadataStore) -> dict[str, Any]:
    """What `status --json` prints. `state` of a bookie: writable, read-only, stalled, draining, or lost: not registered."""
    from magnetar.ledger.directory import BOOKIES_PATH, BookieFacts
    from magnetar.ledger.replication.auditor import AUDITOR_PATH
    from magnetar.ledger.replication.cluster_watch import DRAINING_PATH
    from magnetar.ledger.replication.queue import RepairQueue
    from magnetar.metadata.damage import DAMAGED_PATH
    from magnetar.metadata.ledgers import StoredLedgers
    from magnetar.metadata.paths import COOKIES_PATH, INSTANCE_PATH

    from .registration import BROKER_PATH

    instance, broker = await store.get(INSTANCE_PATH), await store.get(BROKER_PATH)
    auditor, draining = await store.get(AUDITOR_PATH), await store.children(DRAINING_PATH)
    queue = RepairQueue(store, _TIMEOUT_S)
    bookies = []
    for name in sorted({*await store.children(COOKIES_PATH), *await store.children(BOOKIES_PATH)}):
        node = await store.get(f"{BOOKIES_PATH}/{name}")
        fields: dict[str, Any] = {} if node is None else msgpack.unpackb(node.value)
        facts = BookieFacts.of(fields)
        state = "read-only" if facts.read_only else "stalled" if facts.journal_stalled_s else "writable"
        state = "draining" if name in draining else state
        bookies.append(
            {
                "id": name,
                "address": fields.get("address", ""),
                "state": state if fields else "lost",
                "rack": facts.labels.rack,
                "zone": facts.labels.zone,
                "free_bytes": facts.free_bytes,
                "damaged_ledgers": len(await store.children(f"{DAMAGED_PATH}/{name}")),
            }
        )
    return {
        "cluster": "" if instance is None else instance.value.hex(),
        "broker": "" if broker is None else msgpack.unpackb(broker.value)["url"],
        "bookies": bookies,
        "ledgers": sum([len(page) async for page in StoredLedgers(store).pages()]),
        "under_replicated_ledgers": sum([len(await queue.ledgers(page)) for page in await queue.pages()]),
        "auditor": "" if auditor is None else auditor.value.decode(),
    }
