"""Options that several commands share, with their help texts and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

T = TypeVar("T")

DEFAULT_URL = "magnetar://127.0.0.1:7650"

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="MAGNETAR_URL",
        help="The service: magnetar://host:port, several hosts host:port,host:port, or magnetar+srv://name.",
        metavar="URL",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]
Topic = Annotated[
    str, typer.Argument(help="A topic; a short name means persistent://public/default/NAME.", metavar="TOPIC")
]
Start = Annotated[
    str,
    typer.Option(
        "--start",
        help="Where to begin: earliest, latest, a message id (ledger:entry:index) or a time: 2026-01-31T12:00:00 is "
        "local time, 2026-01-31T12:00:00Z and +02:00 name a zone; -1h is an hour ago.",
        metavar="WHERE",
    ),
]
MessageCompression = Annotated[
    str,
    typer.Option("--compression", help="How messages are compressed: none, lz4 or zstd.", metavar="NAME"),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="plain: the value as it is; line: id, publish time, key, properties and value, for people; json: as --json; "
        "or a text with fields of a message in braces: '{key} {value} {properties\\[shop]}'. Without it line on a terminal, "
        "else plain.",
        metavar="FORMAT",
        show_default=False,
    ),
]
Subscription = Annotated[str, typer.Argument(metavar="SUBSCRIPTION")]
Count = Annotated[
    int | None, typer.Option("-n", "--count", min=1, help="Stop after so many.", metavar="COUNT")
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", min=0, help="Stop when none came for so long.", metavar="SECONDS")
]
Force = Annotated[bool, typer.Option("--force", help="Also while producers or consumers are connected.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def with_options(
    run: Callable[..., T], command: Callable[..., Any], **more: tuple[Any, Any]
) -> Callable[..., T]:
    """`run`, which takes keyword arguments, as typer is to see it: with the parameters and the help of `command`, and more.

    `more` are (annotation, default) by name; they come behind those of the command.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name])
        for one in inspect.signature(command).parameters.values()
    ]
    for name, (annotation, default) in more.items():
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, annotation=annotation, default=default))
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run
