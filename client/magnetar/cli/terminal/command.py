"""A command: a coroutine function with annotated options, which returns its answer; one printer shows it.

    @command(topics_app, "list")
    async def topics_list(client: Client, namespace: Annotated[str, typer.Argument(...)] = "") -> Answer:
        names = await client.admin.list_topics(namespace)
        return Answer(names, names)

What it works with comes from a source, with options of its own: a function whose first parameter is called `client` gets one
that is connected, and its command has --url. A command has --json unless it says `json=None`; a function that prints its
answer bit by bit has a parameter `as_json` for it. What is wrong with the command line is found before anything connects:
options are read by their `parser`, and `exclusive` and `question` are seen to first.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, get_type_hints

import typer

from . import session
from .options import DEFAULT_URL, Json, Url, Yes
from .tables import Table, show

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])


class Answer(NamedTuple):
    """What a command found, for scripts (--json) and people. Then it ends with `code`, or with 1 and the line `failure`."""

    value: Any
    shown: Sequence[str | Table]
    failure: str = ""
    code: int = 0

    def print(self, *, as_json: bool) -> None:
        """On standard output; a failure ends the command."""
        if as_json:
            session.print_json(self.value)
        else:
            show(*self.shown)
        if self.failure:
            session.fail(self.failure)


class Source(NamedTuple):
    """What a command works with: options (annotation and default by parameter), and how it is opened with their values."""

    options: dict[str, tuple[Any, Any]]
    open: Callable[..., AbstractAsyncContextManager[Any]]


SERVICE = Source({"url": (Url, DEFAULT_URL)}, session.connected)
# Parameters of a command's function that are no options of the command line.
GIVEN = ("client", "store", "target", "as_json")
NOTHING = Source({}, contextlib.nullcontext)


def command(
    app: typer.Typer,
    name: str,
    panel: str | None = None,
    *,
    source: Source | None = None,
    json: Any = Json,
    question: str = "",
    refusal: str = session.DELETES,
    exclusive: Mapping[str, str] | None = None,
    warnings: bool = False,
) -> Callable[[F], F]:
    """A command of `app`. `json`: the option --json, or None.

    `question`, with the names of parameters in braces, is asked first, unless --yes is given; a script that does not give it
    reads `refusal`. `exclusive`: options, and their parameters, of which one at most may be given. `warnings`: the command
    may wait for ever, so what the client warns of is said.
    """

    def add(function: F) -> F:
        parameters = list(inspect.signature(function).parameters)
        opens = source or (SERVICE if "client" in parameters else NOTHING)

        def start(as_json: bool = False, **values: Any) -> None:
            session.exclusive({option: values[parameter] for option, parameter in (exclusive or {}).items()})
            if question:
                session.confirm(question.format(**values), values.pop("yes"), refusal=refusal)
            where = {option: values.pop(option) for option in opens.options}
            if "as_json" in parameters:
                values["as_json"] = as_json

            async def work() -> None:
                async with opens.open(**where) as given:
                    answer = await function(*([] if opens is NOTHING else [given]), **values)
                if answer is not None:
                    answer.print(as_json=as_json)
                    if answer.code:
                        raise SystemExit(answer.code)

            session.run(work(), warnings=warnings)

        more: dict[str, tuple[Any, Any]] = {"yes": (Yes, False)} if question else {}
        more |= opens.options
        if json is not None:
            more["as_json"] = (json, False)
        app.command(name, rich_help_panel=panel)(with_options(start, function, more))
        return function

    return add


def with_options(
    run: Callable[..., T], function: Callable[..., Any], more: Mapping[str, tuple[Any, Any]]
) -> Callable[..., T]:
    """`run`, which takes keyword arguments, as typer is to see it: with the parameters and the help of `function`, and more.

    `more` are (annotation, default) by name; they come behind those of the function, of which GIVEN are no options.
    """
    signature = inspect.signature(function).parameters
    given = {name: one.default for name, one in signature.items() if name not in GIVEN}
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
