"""The command tree of `magnetar`: where each family of commands hangs, and the help pages of the daemons."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .bookie_tools.commands import tools_app
from .cluster.commands import cluster_app
from .commands.brokers import bookies_app, brokers_app, bundles_app
from .commands.config import config_app
from .commands.consume import consume_app
from .commands.contexts import context_app
from .commands.diagnosis import diagnosis_app
from .commands.objects import namespaces_app, tenants_app
from .commands.perf import perf_app
from .commands.produce import produce_app
from .commands.spark import spark_app
from .commands.subscriptions import subscriptions_app
from .commands.topics import topics_app
from .terminal.command import with_options
from .wiring.flags import FLAGS, SUMMARIES

app = typer.Typer(
    name="magnetar",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # 15 ms that only this needs

        typer.echo(f"magnetar {version('magnetar')}")
        raise typer.Exit


@app.callback()
def magnetar(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """A durable message service: topics, subscriptions and tail readers on replicated ledgers."""


def _add_daemon(name: str) -> None:
    """The help page of a daemon, by the table in `flags`. `main` starts the daemon itself, past typer."""

    def run(**values: Any) -> None:
        """Not called for a daemon; with a subcommand of `magnetar bookie` there is nothing to do."""

    def no_options() -> None: ...

    options: dict[str, tuple[Any, Any]] = {}
    for flag in FLAGS[name]:
        hint = list[str] if flag.setting == "set" else str
        option = typer.Option(flag.option, help=flag.help, metavar=flag.metavar, show_default=False)
        options[flag.option.strip("-").replace("-", "_")] = (Annotated[hint | None, option], None)
    with_options(run, no_options, options)
    if name == "bookie":  # with the operator's commands below it
        tools_app.callback(invoke_without_command=True, help=SUMMARIES[name])(run)
        app.add_typer(tools_app, name=name, rich_help_panel="Daemons")
    else:
        app.command(name, help=SUMMARIES[name], rich_help_panel="Daemons")(run)


for _name in FLAGS:
    _add_daemon(_name)
for _commands in (produce_app, consume_app, config_app, diagnosis_app):
    app.add_typer(_commands)
for _family, _commands in {
    "perf": perf_app,
    "tenants": tenants_app,
    "namespaces": namespaces_app,
    "topics": topics_app,
    "subscriptions": subscriptions_app,
    "brokers": brokers_app,
    "bookies": bookies_app,
    "bundles": bundles_app,
    "cluster": cluster_app,
    "context": context_app,
    "spark": spark_app,
}.items():
    app.add_typer(_commands, name=_family, rich_help_panel="Operate")
