"""What a service has several of, by tables: a family of commands is a row, and the words are the same everywhere.

`magnetar tenants` and `namespaces` (`add_records`) are records that are made and deleted; brokers and bookies
(`add_listing`) are there by themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magnetar.proto.errors import NotFound

from ..terminal.command import Answer, command, with_options
from ..terminal.tables import Table, figures
from .diagnosis import of_each
from .policies import NAMESPACE_POLICIES, add_policies

if TYPE_CHECKING:
    from magnetar.client import Client

    from .policies import Update

tenants_app = typer.Typer(no_args_is_help=True, help="List, make, change and delete tenants.")
namespaces_app = typer.Typer(
    no_args_is_help=True, help="List, make, inspect and delete namespaces; their policies."
)

Name = Annotated[str, typer.Argument(metavar="NAME")]
Namespace = Annotated[
    str, typer.Argument(help="tenant/namespace, as public/default.", metavar="TENANT/NAMESPACE")
]


def _option(name: str, help: str, metavar: str) -> tuple[Any, None]:
    """Repeated; without it nothing is said of it."""
    return Annotated[list[str] | None, typer.Option(name, help=help, metavar=metavar)], None


_OF_TENANTS = {
    "admin_roles": _option("--admin-role", "Who administers it; repeated.", "ROLE"),
    "allowed_clusters": _option("--allowed-cluster", "Where it may be; repeated. Without it: everywhere.", "CLUSTER"),
}  # fmt: skip
_Bundles = Annotated[int | None, typer.Option(min=1, help="Parts of it that brokers share.", metavar="COUNT")]
_OF_NAMESPACES = {"bundles": (_Bundles, None)}


def add_records(
    app: typer.Typer, kind: str, name: Any, parent: Any, options: Mapping[str, tuple[Any, Any]], *verbs: str
) -> None:
    """`list`, `get`, `delete` and these `verbs`, which take the options. `parent`: an argument of `list`, or None."""
    what = kind.removesuffix("s")

    def add(verb: str, doc: str, more: Mapping[str, tuple[Any, Any]], question: str = "") -> None:
        async def run(client: Client, name: str = "", **given: Any) -> Answer:
            said = {option: value for option, value in given.items() if value}
            names = [name]
            if verb == "list" and parent is not None and not name:
                names = await client.admin.administer("tenants", "list")
            answers = [await client.admin.administer(kind, verb, one, **said) for one in names]
            found: Any = [one for answer in answers for one in answer] if verb == "list" else answers[0]
            if found is None:
                return Answer({"name": name, **said}, [f"{verb.removesuffix('e')}ed {what} {name}"])
            return Answer(found, found if verb == "list" else [figures(_flat({"name": name, **found}))])

        shown = with_options(run, lambda client: None, {"client": (Any, ...), **more})
        shown.__doc__ = doc
        command(app, verb, question=question)(shown)

    named = {"name": (name, ...)}
    add("list", f"Names of the {kind}.", {} if parent is None else {"name": (parent, "")})
    add("get", f"Show what is laid down for a {what}.", named)
    for verb in verbs:
        add(verb, f"{verb.title()} a {what}.", {**named, **options})
    force = typer.Option("--force", help="With all that is in it, if broker.allow_forced_deletion is set.")
    of_delete = {**named, "force": (Annotated[bool, force], False)}
    add("delete", f"Delete a {what} that is empty.", of_delete, f"Delete the {what} {{name}}?")


def _flat(found: Mapping[str, Any]) -> dict[str, str]:
    """What is set, each on a line; what maps have under their own keys."""
    rows: dict[str, str] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            rows |= {f"{name} {key}": each for key, each in _flat(value).items()}
        elif name != "format" and value not in (None, "", []):
            rows[name] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return rows


def add_listing(
    app: typer.Typer,
    what: str,
    about: str,
    ask: Callable[[Client], Awaitable[list[dict[str, Any]]]],
    columns: Mapping[str, Callable[[dict[str, Any]], str]],
    right: Sequence[int] = (),
) -> None:
    """`list` and `get`. `what` one is called, and what the list shows `about` them; a column is a heading and a cell."""

    async def found(client: Client) -> Answer:
        rows = await ask(client)
        shown = [[cell(row) for cell in columns.values()] for row in rows]
        return Answer(rows, [Table("", tuple(columns), shown, right)])

    async def one(client: Client, name: Name) -> Answer:
        rows = {row["name"]: row for row in await ask(client)}
        if name not in rows:
            raise NotFound(f"there is no {what} {name}; there are {', '.join(rows) or 'none'}")
        return Answer(rows[name], [figures(_flat(rows[name]))])

    found.__doc__ = f"List the {what}s{about}."
    one.__doc__ = f"Show all that is known of a {what}."
    command(app, "list")(found)
    command(app, "get")(one)


add_records(tenants_app, "tenants", Name, None, _OF_TENANTS, "create", "update")
_Tenant = Annotated[str, typer.Argument(help="Those of all tenants without it.", metavar="TENANT")]
add_records(namespaces_app, "namespaces", Namespace, _Tenant, _OF_NAMESPACES, "create")


def _policies(namespace: Namespace) -> Update:
    """Set policies of all topics of a namespace that have none of their own, and show those in force."""
    return lambda client, changed: client.admin.update_namespace_policies(namespace, changed)


add_policies(namespaces_app, NAMESPACE_POLICIES, _policies)


@command(namespaces_app, "stats")
async def namespaces_stats(client: Client, namespace: Namespace) -> Answer:
    """How many topics it has; rates, sizes and backlog of those that are loaded, of all brokers together."""
    await client.admin.administer("namespaces", "get", namespace)  # raises NotFound
    topics = len(await client.admin.list_topics(namespace))
    found, failed = await of_each(
        client, lambda there: there.admin.administer("namespaces", "stats", namespace)
    )
    stats: dict[str, Any] = {"namespace": namespace, "topics": topics}
    for name in next(iter(found.values()), {}):
        stats[name] = sum(one[name] for one in found.values())
    silent = [f"{name} does not answer, and is not counted: {error}" for name, error in failed.items()]
    return Answer({**stats, "failed": failed}, [figures(stats), *silent])
