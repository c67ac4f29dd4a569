"""What commands have in common: `runs` is for one with a loop; `asks` for one that asks a service one thing.

`asks` connects, asks, and prints the answer for people, or as JSON with --json:

    @asks(topics_app, "list")
    def topics_list(namespace: ... = "") -> Ask:
        return Ask(lambda client: client.admin.list_topics(namespace), show)

What is wrong with the command line is found in the function itself, so before anything connects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from .options import DEFAULT_URL, Json, Url, Yes, with_options
from .session import confirm, fail, print_json, run

if TYPE_CHECKING:
    from magnetar.client import Client


class Ask(NamedTuple):
    """What to ask, and how the answer is shown to people; a `failure` that it tells of ends the command with exit code 1."""

    call: Callable[[Client], Awaitable[Any]]
    show: Callable[[Any], None]
    failure: Callable[[Any], str] = lambda answer: ""


def asks(
    app: typer.Typer,
    name: str,
    *,
    json: bool = True,
    question: str = "",
    refusal: str = "this deletes data: say --yes",
) -> Callable[[Callable[..., Ask]], None]:
    """A command of `app`. `question`, with the names of parameters in braces: is asked before, unless --yes is given."""

    def add(command: Callable[..., Ask]) -> None:
        def ask(url: str, as_json: bool = False, yes: bool = True, **values: Any) -> None:
            asked = command(**values)
            if question:
                confirm(question.format(**values), yes, refusal=refusal)
            run(_ask(url, asked, as_json=as_json))

        more: dict[str, tuple[Any, Any]] = {"yes": (Yes, False)} if question else {}
        more["url"] = (Url, DEFAULT_URL)
        if json:
            more["as_json"] = (Json, False)
        app.command(name)(with_options(ask, command, **more))

    return add


def runs(
    app: typer.Typer, name: str, panel: str | None = None, *, warnings: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A command of `app`: a coroutine function, or one that imports and returns a coroutine function of its parameters.

    `warnings`: it may wait for ever, so what the client warns of is said.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        def start(**values: Any) -> None:
            work = command(**values)
            run(work if isinstance(work, Coroutine) else work(**values), warnings=warnings)

        app.command(name, rich_help_panel=panel)(with_options(start, command))
        return command

    return add


async def _ask(url: str, asked: Ask, *, as_json: bool) -> None:
    from magnetar.client import connect

    async with connect(url) as client:
        answer = await asked.call(client)
    if as_json:
        print_json(answer)
    else:
        asked.show(answer)
    if reason := asked.failure(answer):
        fail(reason)
