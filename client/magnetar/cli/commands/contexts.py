"""`magnetar context`: services by name, and which one the commands talk to."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from magnetar.proto.errors import InvalidArgument

from ..terminal.command import Answer, command
from ..terminal.contexts import LOCAL_URL, Context, Contexts
from ..terminal.tables import Table

context_app = typer.Typer(no_args_is_help=True, help="Services by name, and which one the commands talk to.")


def _known(incomplete: str) -> list[str]:
    return [name for name in Contexts.load().contexts if name.startswith(incomplete)]


Name = Annotated[str, typer.Argument(metavar="NAME", autocompletion=_known)]


@command(context_app, "list")
async def context_list() -> Answer:
    """The contexts; the one in use has a star."""
    known = Contexts.load()
    rows = [
        ("*" if name == known.current else "", name, one.url) for name, one in sorted(known.contexts.items())
    ]
    if not known.current:
        rows.insert(0, ("*", "(this machine)", LOCAL_URL))
    return Answer(msgspec.to_builtins(known), [Table("", ("", "context", "url"), rows)])


@command(context_app, "add", json=None)
async def context_add(
    name: Name,
    url: Annotated[str, typer.Option("--url", help="The service, as other commands take it.", metavar="URL")],
    use: Annotated[bool, typer.Option("--use", help="The commands talk to it from now on.")] = False,
) -> Answer:
    """Give a service a name; one that is known is changed."""
    from magnetar.client.service_url import parse_url

    if not name.isprintable() or not name.strip():
        raise InvalidArgument(f"a context cannot be called {name!r}; give it a plain name, as prod")
    parse_url(url)
    known = Contexts.load()
    known.contexts[name] = Context(url)
    known.current = name if use else known.current
    known.save()
    hint = "" if known.current == name else f"; use it: magnetar context use {name}"
    return Answer(None, [f"context {name} is {url}{hint}"])


@command(context_app, "use", json=None)
async def context_use(
    name: Annotated[
        str, typer.Argument(help="`-`: this machine again.", metavar="NAME", autocompletion=_known)
    ],
) -> Answer:
    """The commands talk to this one from now on."""
    known = Contexts.load()
    known.current = "" if name == "-" else name
    url = known.url
    known.save()
    return Answer(None, [f"commands talk to {url}"])


@command(context_app, "remove", json=None)
async def context_remove(name: Name) -> Answer:
    """Forget a context."""
    known = Contexts.load()
    known.get(name)
    del known.contexts[name]
    known.current = "" if known.current == name else known.current
    known.save()
    return Answer(None, [f"context {name} is forgotten"])
