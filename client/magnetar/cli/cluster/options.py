"""Options of `magnetar cluster`, and the metadata that its commands work on."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from ..terminal.command import Source
from ..wiring.metadata import open_store

Metadata = Annotated[
    str,
    typer.Option(
        "--metadata",
        envvar="MAGNETAR_DAEMON_METADATA",
        help="The metadata that the cluster shares: zk://host:port,host:port/root.",
        metavar="URL",
    ),
]
Kind = Annotated[
    str, typer.Option("--kind", help="broker or bookie, where one of each has the name.", metavar="KIND")
]

# Gives a command the `store` of its cluster.
STORE = Source({"metadata": (Metadata, inspect.Parameter.empty)}, open_store)
