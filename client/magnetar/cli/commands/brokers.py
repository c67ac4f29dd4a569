"""`magnetar brokers`, `bookies`, `bundles`: who serves and stores which topics, and moving them. Any broker is asked."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal.command import Answer, command
from ..terminal.tables import Table, text
from .diagnosis import BOOKIE_COLUMNS
from .objects import add_listing
from .policies import BROKER_POLICIES, add_policies

if TYPE_CHECKING:
    from magnetar.client import Client

    from .policies import Update

brokers_app = typer.Typer(no_args_is_help=True, help="List and show brokers; policies of all of them.")
bookies_app = typer.Typer(no_args_is_help=True, help="List and show the bookies that brokers know.")
bundles_app = typer.Typer(no_args_is_help=True, help="List bundles of topics; move and divide them.")

Bundle = Annotated[
    str,
    typer.Argument(
        help="A bundle as `bundles list` names it, or a topic, which means its bundle.", metavar="BUNDLE"
    ),
]


def _load(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: text(row["load"][name])


add_listing(
    brokers_app, "broker", " of the cluster with their load: messages a second, and the share of a core",
    lambda client: client.admin.brokers(),
    {
        "broker": itemgetter("name"), "address": lambda row: row["url"].removeprefix("magnetar://"),
        "state": itemgetter("state"), "zone": itemgetter("zone"), "bundles": _load("bundles"), "topics": _load("topics"),
        "in/s": _load("messages_in"), "out/s": _load("messages_out"), "CPU": lambda row: f"{row['load']['cpu']:.0%}",
    },
    right=(4, 5, 6, 7, 8),
)  # fmt: skip
add_listing(
    bookies_app, "bookie", ": which take entries, why others do not, and what their disks have left",
    lambda client: client.admin.bookies(), BOOKIE_COLUMNS, right=(3,),
)  # fmt: skip


def _broker_policies() -> Update:
    """Set policies for all brokers while they run, and show those in force for topics whose namespaces have none."""
    return lambda client, changed: client.admin.update_broker_policies(changed)


add_policies(brokers_app, BROKER_POLICIES, _broker_policies)


@command(bundles_app, "list")
async def bundles_list(
    client: Client,
    namespace: Annotated[str, typer.Argument(metavar="TENANT/NAMESPACE")] = "public/default",
) -> Answer:
    """Bundles of a namespace and the brokers that own them."""
    found = await client.admin.bundles(namespace)
    rows = [(row["bundle"], row["broker"] or "-", row["to"]) for row in found]
    return Answer(found, [Table("", ("bundle", "broker", "goes to"), rows)])


@command(bundles_app, "unload")
async def bundles_unload(
    client: Client,
    bundle: Bundle,
    to: Annotated[
        str,
        typer.Option("--to", help="The broker that gets it; without it one of low load.", metavar="BROKER"),
    ] = "",
) -> Answer:
    """Move a bundle to another broker. Producers and consumers go on there."""
    await client.admin.unload_bundle(bundle, to=to)
    return Answer({"bundle": bundle, "to": to}, [f"{bundle} has moved{f' to {to}' if to else ''}"])


@command(bundles_app, "split")
async def bundles_split(client: Client, bundle: Bundle) -> Answer:
    """Divide a bundle in two, so that its parts can be moved apart. Producers and consumers do not notice."""
    parts = await client.admin.split_bundle(bundle)
    return Answer(parts, parts)
