"""The command tree of `magnetar`: names, options and help. What a command does is imported when it runs."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from .bookie_tools.commands import tools_app
from .cluster.commands import cluster_app
from .commands.brokers import brokers_app, bundles_app
from .commands.spark import spark_app
from .commands.subscriptions import subscriptions_app
from .commands.topics import namespaces_app, topics_app
from .terminal.asking import runs
from .terminal.options import (
    DEFAULT_URL,
    Count,
    Format,
    Json,
    MessageCompression,
    Start,
    Timeout,
    Topic,
    Url,
    with_options,
)
from .terminal.session import exclusive, named_values, parsed, start_of, utf8
from .wiring.flags import FLAGS, SUMMARIES

app = typer.Typer(
    name="magnetar",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
perf_app = typer.Typer(no_args_is_help=True, help="Measure: produce, consume or tail as fast as it goes.")
app.add_typer(perf_app, name="perf", rich_help_panel="Operate")
app.add_typer(topics_app, name="topics", rich_help_panel="Operate")
app.add_typer(namespaces_app, name="namespaces", rich_help_panel="Operate")
app.add_typer(subscriptions_app, name="subscriptions", rich_help_panel="Operate")
app.add_typer(brokers_app, name="brokers", rich_help_panel="Operate")
app.add_typer(bundles_app, name="bundles", rich_help_panel="Operate")
app.add_typer(cluster_app, name="cluster", rich_help_panel="Operate")
app.add_typer(spark_app, name="spark", rich_help_panel="Operate")


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


def _with_context(context: typer.Context) -> None:
    """The parameters that a daemon's command has beside its flags."""


def _add_daemon(command: str) -> None:
    """A command whose options are the table in `flags`. It runs only with --help: see `main.main`."""
    group = command == "bookie"  # with the operator's commands below it

    def run(context: typer.Context, **values: str | list[str] | None) -> None:
        if context.invoked_subcommand is not None:
            return
        from .wiring.daemons import main

        line: list[str] = []
        for name, value in values.items():
            option = "--" + name.replace("_", "-")
            for text in [value] if isinstance(value, str) else value or []:
                line += [option, text]
        raise typer.Exit(main(command, line))

    options: dict[str, tuple[Any, Any]] = {}
    for flag in FLAGS[command]:
        hint = list[str] if flag.setting == "set" else str
        option = typer.Option(flag.option, help=flag.help, metavar=flag.metavar, show_default=False)
        options[flag.option.strip("-").replace("-", "_")] = (Annotated[hint | None, option], None)
    with_options(run, _with_context, **options)
    if group:
        tools_app.callback(invoke_without_command=True, help=SUMMARIES[command])(run)
        app.add_typer(tools_app, name=command, rich_help_panel="Daemons")
    else:
        app.command(command, help=SUMMARIES[command], rich_help_panel="Daemons")(run)


for _command in FLAGS:
    _add_daemon(_command)


File = Annotated[
    str | None,
    typer.Option("--file", "-f", help="Send each line of this file; - is standard input.", metavar="F"),
]
Texts = Annotated[
    list[str] | None,
    typer.Option("-m", "--message", help="Send this text; may be repeated.", metavar="TEXT"),
]
Payload = Annotated[
    str | None,
    typer.Option("--payload", help="Send this whole file as one message; - is standard input.", metavar="F"),
]
Key = Annotated[str | None, typer.Option("--key", help="The key of every message.", metavar="TEXT")]
KeyField = Annotated[
    str | None,
    typer.Option("--key-field", help="Lines are JSON objects; this field is the key.", metavar="K"),
]
Properties = Annotated[
    list[str] | None,
    typer.Option("--property", help="A property of every message; may be repeated.", metavar="NAME=VALUE"),
]
EventTime = Annotated[
    str | None,
    typer.Option(
        "--event-time",
        help="The event time of every message: 2026-01-31T12:00:00 is local time, "
        "2026-01-31T12:00:00Z and +02:00 name a zone.",
        metavar="TIME",
    ),
]


@runs(app, "produce", "Messages", warnings=True)
async def produce(
    topic: Topic,
    file: File = None,
    texts: Texts = None,
    payload: Payload = None,
    key: Key = None,
    key_field: KeyField = None,
    properties: Properties = None,
    event_time: EventTime = None,
    compression: MessageCompression = "none",
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Send messages: every line of standard input or of a file, every -m, or a whole file is one."""
    from magnetar.client.options import parse_time
    from magnetar.proto.compression import Compression

    from .commands import produce as command

    exclusive({"--file": file is not None, "-m": bool(texts), "--payload": payload is not None})
    exclusive({"--key": key is not None, "--key-field": key_field is not None})
    exclusive({"--payload": payload is not None, "--key-field": key_field is not None})
    parsed("--compression", Compression.parse, compression)
    attributes = command.Attributes(
        properties=named_values("--property", properties or (), "origin=ACE") or None,
        event_time=None if event_time is None else parsed("--event-time", parse_time, event_time),
    )
    await command.produce(
        url,
        topic,
        file=file,
        texts=texts or [],
        payload=payload,
        key=None if key is None else parsed("--key", utf8, key),
        key_field=key_field,
        attributes=attributes,
        compression=compression,
        as_json=as_json,
    )


@runs(app, "consume", "Messages", warnings=True)
async def consume(
    topics: Annotated[
        list[str],
        typer.Argument(
            help="One or several; a short name means persistent://public/default/NAME.", metavar="TOPIC..."
        ),
    ],
    subscription: Annotated[
        str, typer.Option("-s", "--subscription", help="Created at --start when it is new.", metavar="NAME")
    ],
    kind: Annotated[
        str, typer.Option("-t", "--type", help="exclusive, failover, shared or key_shared.", metavar="TYPE")
    ] = "exclusive",
    count: Count = None,
    start: Start = "latest",
    timeout: Timeout = None,
    format: Format = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
    pattern: Annotated[
        bool,
        typer.Option(
            "--pattern", help="TOPIC is a regular expression: all topics of the namespace that it matches."
        ),
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow/--no-follow",
            help="Wait for more at the end, as tail -f does, or stop when everything stored is acknowledged.",
        ),
    ] = True,
) -> None:
    """Receive messages of a subscription, print each on a line, and acknowledge it.

    At the end it waits for more until Ctrl-C, unless --count, --timeout or --no-follow says when to stop.
    """
    from .commands import consume as command

    exclusive({"--format": format is not None, "--json": as_json})
    await command.consume(
        url,
        parsed("--pattern", partial(command.topics_of, pattern=pattern), topics),
        subscription,
        kind=kind,
        count=count,
        start=start_of(start),
        timeout=timeout,
        follow=follow,
        encode=parsed("--format", command.encoder, "json" if as_json else format),
    )


@runs(app, "tail", "Messages", warnings=True)
async def tail(
    topic: Topic,
    count: Count = None,
    start: Start = "latest",
    timeout: Timeout = None,
    format: Format = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Follow a topic without a subscription."""
    from .commands import consume as command

    exclusive({"--format": format is not None, "--json": as_json})
    encode = parsed("--format", command.encoder, "json" if as_json else format)
    await command.tail(url, topic, count=count, start=start_of(start), timeout=timeout, encode=encode)


Size = Annotated[int, typer.Option("--size", min=1, help="Bytes of a message.", metavar="N")]
Rate = Annotated[
    float, typer.Option("--rate", min=0, help="Messages per second; 0: as fast as it goes.", metavar="N")
]
Messages = Annotated[
    int | None,
    typer.Option("--messages", "-n", min=1, help="How many; without it until Ctrl-C.", metavar="N"),
]
Batch = Annotated[
    int,
    typer.Option("--batch", min=1, help="Messages a batch; 1 sends each in a frame of its own.", metavar="N"),
]


@runs(perf_app, "produce", warnings=True)
def perf_produce(
    topic: Topic,
    size: Size = 100,
    rate: Rate = 0,
    messages: Messages = None,
    batch: Batch = 1000,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> Any:
    """Send messages and show the rate and the time until each was durable.

    At a --rate each takes longer than one sent right after another: the
    processes on its way sleep in between, and have to be woken.
    """
    from .commands.perf import produce

    return produce


@runs(perf_app, "consume", warnings=True)
def perf_consume(
    topic: Topic,
    subscription: Annotated[
        str,
        typer.Option(
            "-s",
            "--subscription",
            help="It is not durable: it ends with the last command that uses it. Commands that use one share its messages.",
            metavar="NAME",
        ),
    ] = "perf",
    kind: Annotated[
        str, typer.Option("-t", "--type", help="exclusive, failover, shared or key_shared.", metavar="TYPE")
    ] = "shared",
    start: Start = "earliest",
    messages: Messages = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> Any:
    """Receive and acknowledge each message, and show the rate."""
    from .commands.perf import consume

    return consume


@runs(perf_app, "tail", warnings=True)
def perf_tail(
    topic: Topic,
    start: Start = "latest",
    messages: Messages = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> Any:
    """Follow a topic and show the rate and the time from publishing to here."""
    from .commands.perf import tail

    return tail


@app.command("config", rich_help_panel="Operate")
def config(
    file: Annotated[str | None, typer.Option("--config", help="Settings in TOML.", metavar="FILE")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="As a daemon takes it.", metavar="SECTION.NAME=VALUE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show every setting, its value and where it comes from; the output is a settings file."""
    from .commands.config import show

    show(file, assignments or [], as_json=as_json)
