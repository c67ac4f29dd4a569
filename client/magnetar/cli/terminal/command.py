"""A command: a coroutine function with annotated options, which returns its answer; one printer shows it.

    @command(topics_app, "list")
    async def topics_list(client: Client, namespace: Annotated[str, typer.Argument(...)] = "") -> Answer:
        names = await client.admin.list_topics(namespace)
        return Answer(names, names)

A function whose first parameter is called `client` gets one that is connected, and its command has the option --url. A
command has --json unless it says `json=False`. What is wrong with the command line is found before anything connects:
options are read by their `parser`, and `exclusive` and `question` are seen to first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, get_type_hints

import typer

from . import session
from .options import DEFAULT_URL, Json, Url, Yes
from .tables import Table, print_table

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])


class Answer(NamedTuple):
    """What a command found: for scripts (--json) and for people. With a `failure` it ends with exit code 1."""

    value: Any
    shown: Sequence[str | Table]
    failure: str = ""

    def print(self, *, as_json: bool) -> None:
        """On standard output; a failure ends the command."""
        if as_json:
            session.print_json(self.value)
        else:
            for one in self.shown:
                print(one) if isinstance(one, str) else print_table(*one)
        if self.failure:
            session.fail(self.failure)


def command(
    app: typer.Typer,
    name: str,
    panel: str | None = None,
    *,
    json: bool = True,
    question: str = "",
    refusal: str = session.DELETES,
    exclusive: Mapping[str, str] | None = None,
    warnings: bool = False,
) -> Callable[[F], F]:
    """A command of `app`.

    `question`, with the names of parameters in braces, is asked first, unless --yes is given; a script that does not give it
    reads `refusal`. `exclusive`: options, and their parameters, of which one at most may be given. `warnings`: the command
    may wait for ever, so what the client warns of is said.
    """

    def add(function: F) -> F:
        connects = "client" in inspect.signature(function).parameters

        def start(yes: bool = True, **values: Any) -> None:
            session.exclusive({option: values[parameter] for option, parameter in (exclusive or {}).items()})
            if question:
                session.confirm(question.format(**values), yes, refusal=refusal)
            url = values.pop("url") if connects else ""
            as_json = values.pop("as_json") if json else False
            session.run(_answer(function, url, values, as_json=as_json), warnings=warnings)

        more: dict[str, tuple[Any, Any]] = {"yes": (Yes, False)} if question else {}
        if connects:
            more["url"] = (Url, DEFAULT_URL)
        if json:
            more["as_json"] = (Json, False)
        app.command(name, rich_help_panel=panel)(with_options(start, function, **more))
        return function

    return add


async def _answer(
    function: Callable[..., Coroutine[Any, Any, Answer | None]],
    url: str,
    values: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    if url:
        async with session.connected(url) as client:
            answer = await function(client, **values)
    else:
        answer = await function(**values)
    if answer is not None:
        answer.print(as_json=as_json)


def with_options(
    run: Callable[..., T], function: Callable[..., Any], **more: tuple[Any, Any]
) -> Callable[..., T]:
    """`run`, which takes keyword arguments, as typer is to see it: with the parameters and the help of `function`, and more.

    `more` are (annotation, default) by name; they come behind those of the function. Its `client` is no option.
    """
    given = {
        name: one.default for name, one in inspect.signature(function).parameters.items() if name != "client"
    }
    written = SimpleNamespace(__annotations__={name: function.__annotations__[name] for name in given})
    hints = get_type_hints(written, function.__globals__, include_extras=True)
    options = {**{name: (hints[name], default) for name, default in given.items()}, **more}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in options.items()
    ]
    run.__doc__ = function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run
