"""Options that several commands share, with their help texts and defaults."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .contexts import LOCAL_URL, Contexts
from .session import parsed, start_of

DEFAULT_URL = ""  # that of the context in use


def _url(given: str) -> str:
    return given or parsed("the context in use", lambda known: known.load().url, Contexts)


Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="MAGNETAR_URL",
        help="The service: magnetar://host:port, several hosts host:port,host:port, or magnetar+srv://name.",
        metavar="URL",
        show_default=f"of the context in use, or {LOCAL_URL}",
        callback=_url,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]
Topic = Annotated[
    str, typer.Argument(help="A topic; a short name means persistent://public/default/NAME.", metavar="TOPIC")
]
_WHERE = (
    "Where to begin: earliest, latest, a message id (ledger:entry:index) or a time: 2026-01-31T12:00:00 is "
    "local time, 2026-01-31T12:00:00Z and +02:00 name a zone; -1h is an hour ago."
)
Start = Annotated[str, typer.Option("--start", help=_WHERE, metavar="WHERE")]
# The same, read as `client.options.Start`.
Begin = Annotated[Any, typer.Option("--start", help=_WHERE, metavar="WHERE", parser=start_of)]
MessageCompression = Annotated[
    str,
    typer.Option(
        "--compression", help="How messages are compressed: none, lz4, zstd, zlib or snappy.", metavar="NAME"
    ),
]
Subscription = Annotated[str, typer.Argument(metavar="SUBSCRIPTION")]
Kind = Annotated[
    str, typer.Option("-t", "--type", help="exclusive, failover, shared or key_shared.", metavar="TYPE")
]
Count = Annotated[
    int | None, typer.Option("-n", "--count", min=1, help="Stop after so many.", metavar="COUNT")
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", min=0, help="Stop when none came for so long.", metavar="SECONDS")
]
Force = Annotated[bool, typer.Option("--force", help="Also while producers or consumers are connected.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
