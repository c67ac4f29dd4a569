"""`magnetar brokers` and `magnetar bundles`: who serves which topics, and moving them. Any broker is asked."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..terminal.asking import Ask, asks
from ..terminal.tables import print_table, text

brokers_app = typer.Typer(no_args_is_help=True, help="List brokers.")
bundles_app = typer.Typer(no_args_is_help=True, help="List bundles of topics; move and divide them.")

Bundle = Annotated[
    str,
    typer.Argument(
        help="A bundle as `bundles list` names it, or a topic, which means its bundle.", metavar="BUNDLE"
    ),
]


@asks(brokers_app, "list")
def brokers_list() -> Ask:
    """Brokers of the cluster with their load: messages a second, and the share of a core."""
    return Ask(lambda client: client.admin.brokers(), _print_brokers)


def _print_brokers(found: list[dict[str, Any]]) -> None:
    rows = []
    for row in found:
        load = row["load"]
        numbers = [text(load[name]) for name in ("bundles", "topics", "messages_in", "messages_out")]
        address = row["url"].removeprefix("magnetar://")
        rows.append((row["name"], address, row["state"], row["zone"], *numbers, f"{load['cpu']:.0%}"))
    columns = ("broker", "address", "state", "zone", "bundles", "topics", "in/s", "out/s", "CPU")
    print_table("", columns, rows, right=(4, 5, 6, 7, 8))


@asks(bundles_app, "list")
def bundles_list(
    namespace: Annotated[str, typer.Argument(metavar="TENANT/NAMESPACE")] = "public/default",
) -> Ask:
    """Bundles of a namespace and the brokers that own them."""

    def show(found: list[dict[str, Any]]) -> None:
        rows = [(row["bundle"], row["broker"] or "-", row["to"]) for row in found]
        print_table("", ("bundle", "broker", "goes to"), rows)

    return Ask(lambda client: client.admin.bundles(namespace), show)


@asks(bundles_app, "unload", json=False)
def bundles_unload(
    bundle: Bundle,
    to: Annotated[
        str,
        typer.Option("--to", help="The broker that gets it; without it one of low load.", metavar="BROKER"),
    ] = "",
) -> Ask:
    """Move a bundle to another broker. Producers and consumers go on there."""
    return Ask(
        lambda client: client.admin.unload_bundle(bundle, to=to),
        lambda _: print(f"{bundle} has moved{f' to {to}' if to else ''}"),
    )


@asks(bundles_app, "split", json=False)
def bundles_split(bundle: Bundle) -> Ask:
    """Divide a bundle in two, so that its parts can be moved apart. Producers and consumers do not notice."""
    return Ask(lambda client: client.admin.split_bundle(bundle), lambda parts: print(*parts, sep="\n"))
