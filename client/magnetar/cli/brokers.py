"""`magnetar brokers` and `magnetar bundles`: who serves which topics, and moving them. Any broker is asked."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import DEFAULT_URL, Json, Url

brokers_app = typer.Typer(no_args_is_help=True, help="List brokers.")
bundles_app = typer.Typer(no_args_is_help=True, help="List bundles of topics; move and divide them.")

Bundle = Annotated[
    str,
    typer.Argument(
        help="A bundle as `bundles list` names it, or a topic, which means its bundle.", metavar="BUNDLE"
    ),
]


@brokers_app.command("list")
def brokers_list(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Brokers of the cluster with their load: messages a second, and the share of a core."""
    from .session import run

    run(_list_brokers(url, as_json=as_json))


@bundles_app.command("list")
def bundles_list(
    namespace: Annotated[str, typer.Argument(metavar="TENANT/NAMESPACE")] = "public/default",
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Bundles of a namespace and the brokers that own them."""
    from .session import run

    run(_list_bundles(url, namespace, as_json=as_json))


@bundles_app.command("unload")
def bundles_unload(
    bundle: Bundle,
    to: Annotated[
        str,
        typer.Option("--to", help="The broker that gets it; without it one of low load.", metavar="BROKER"),
    ] = "",
    url: Url = DEFAULT_URL,
) -> None:
    """Move a bundle to another broker. Producers and consumers go on there."""
    from .session import run

    run(_unload(url, bundle, to))


@bundles_app.command("split")
def bundles_split(bundle: Bundle, url: Url = DEFAULT_URL) -> None:
    """Divide a bundle in two, so that its parts can be moved apart. Producers and consumers do not notice."""
    from .session import run

    run(_split(url, bundle))


async def _list_brokers(url: str, *, as_json: bool) -> None:
    from magnetar.client import connect

    from .session import print_json
    from .tables import print_table, text

    async with connect(url) as client:
        found = await client.brokers()
    if as_json:
        print_json(found)
        return
    rows = []
    for row in found:
        load = row["load"]
        numbers = [text(load[name]) for name in ("bundles", "topics", "messages_in", "messages_out")]
        address = row["url"].removeprefix("magnetar://")
        rows.append((row["name"], address, row["state"], row["zone"], *numbers, f"{load['cpu']:.0%}"))
    columns = ("broker", "address", "state", "zone", "bundles", "topics", "in/s", "out/s", "CPU")
    print_table("", columns, rows, right=(4, 5, 6, 7, 8))


async def _list_bundles(url: str, namespace: str, *, as_json: bool) -> None:
    from magnetar.client import connect

    from .session import print_json
    from .tables import print_table

    async with connect(url) as client:
        found = await client.bundles(namespace)
    if as_json:
        print_json(found)
        return
    rows = [(row["bundle"], row["broker"] or "-", row["to"]) for row in found]
    print_table("", ("bundle", "broker", "goes to"), rows)


async def _unload(url: str, bundle: str, to: str) -> None:
    from magnetar.client import connect

    async with connect(url) as client:
        await client.unload_bundle(bundle, to=to)
    print(f"{bundle} has moved{f' to {to}' if to else ''}")


async def _split(url: str, bundle: str) -> None:
    from magnetar.client import connect

    async with connect(url) as client:
        for part in await client.split_bundle(bundle):
            print(part)
