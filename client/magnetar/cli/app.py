"""The command tree of `magnetar`; each group of commands is a module of its own and imports lazily."""

from importlib.metadata import version
from typing import Annotated

import typer

app = typer.Typer(name="magnetar", no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"magnetar {version('magnetar')}")
        raise typer.Exit


@app.callback()
def magnetar(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """A Pulsar-like message service."""
