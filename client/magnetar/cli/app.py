"""The command tree of `magnetar`: names, options and help. What a command does is imported when it runs."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Annotated

import typer

from .bookie_tools import tools_app
from .brokers import brokers_app, bundles_app
from .cluster import cluster_app
from .flags import FLAGS, SUMMARIES
from .options import (
    DEFAULT_URL,
    Count,
    Format,
    Json,
    MessageCompression,
    Start,
    Timeout,
    Topic,
    Url,
)
from .spark import spark_app
from .subscriptions import subscriptions_app
from .topics import namespaces_app, topics_app

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


def _add_daemon(command: str) -> None:
    """A command whose options are the table in `flags`. It runs only with --help: see `main.main`."""
    group = command == "bookie"  # with the operator's commands below it

    def run(context: typer.Context, **values: str | list[str] | None) -> None:
        if context.invoked_subcommand is not None:
            return
        from .daemons import main

        line: list[str] = []
        for name, value in values.items():
            option = "--" + name.rstrip("_").replace("_", "-")
            for text in [value] if isinstance(value, str) else value or []:
                line += [option, text]
        raise typer.Exit(main(command, line))

    parameters = [
        inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    ]
    for flag in FLAGS[command]:
        hint = list[str] if flag.setting == "set" else str
        option = typer.Option(flag.option, help=flag.help, metavar=flag.metavar, show_default=False)
        parameters.append(
            inspect.Parameter(
                flag.option.strip("-").replace("-", "_"),
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[hint | None, option],
            )
        )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
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


@app.command("produce", rich_help_panel="Messages")
def produce(
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

    from . import produce as command
    from .session import exclusive, named_values, parsed, run, utf8

    exclusive({"--file": file is not None, "-m": bool(texts), "--payload": payload is not None})
    exclusive({"--key": key is not None, "--key-field": key_field is not None})
    exclusive({"--payload": payload is not None, "--key-field": key_field is not None})
    parsed("--compression", Compression.parse, compression)
    attributes = command.Attributes(
        properties=named_values("--property", properties or (), "origin=ACE") or None,
        event_time=None if event_time is None else parsed("--event-time", parse_time, event_time),
    )
    run(
        command.produce(
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
    )


@app.command("consume", rich_help_panel="Messages")
def consume(
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
    from . import consume as command
    from .session import exclusive, parsed, run, start_of

    exclusive({"--format": format is not None, "--json": as_json})
    run(
        command.consume(
            url,
            parsed("--pattern", partial(command.topics_of, pattern=pattern), topics),
            subscription,
            kind=kind,
            count=count,
            start=start_of(start),
            timeout=timeout,
            follow=follow,
            encode=parsed("--format", command.encoder, "json" if as_json else format),
        ),
        warnings=True,
    )


@app.command("tail", rich_help_panel="Messages")
def tail(
    topic: Topic,
    count: Count = None,
    start: Start = "latest",
    timeout: Timeout = None,
    format: Format = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Follow a topic without a subscription."""
    from . import consume as command
    from .session import exclusive, parsed, run, start_of

    exclusive({"--format": format is not None, "--json": as_json})
    encode = parsed("--format", command.encoder, "json" if as_json else format)
    run(
        command.tail(url, topic, count=count, start=start_of(start), timeout=timeout, encode=encode),
        warnings=True,
    )


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


@perf_app.command("produce")
def perf_produce(
    topic: Topic,
    size: Size = 100,
    rate: Rate = 0,
    messages: Messages = None,
    batch: Batch = 1000,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Send messages and show the rate and the time until each was durable.

    At a --rate each takes longer than one sent right after another: the
    processes on its way sleep in between, and have to be woken.
    """
    from . import perf
    from .session import run

    run(perf.produce(url, topic, size=size, rate=rate, messages=messages, batch=batch, as_json=as_json))


@perf_app.command("consume")
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
) -> None:
    """Receive and acknowledge each message, and show the rate."""
    from . import perf
    from .session import run, start_of

    run(
        perf.consume(
            url, topic, subscription, kind=kind, start=start_of(start), messages=messages, as_json=as_json
        ),
        warnings=True,
    )


@perf_app.command("tail")
def perf_tail(
    topic: Topic,
    start: Start = "latest",
    messages: Messages = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Follow a topic and show the rate and the time from publishing to here."""
    from . import perf
    from .session import run, start_of

    run(perf.tail(url, topic, start=start_of(start), messages=messages, as_json=as_json), warnings=True)


@app.command("config", rich_help_panel="Operate")
def config(
    file: Annotated[str | None, typer.Option("--config", help="Settings in TOML.", metavar="FILE")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="As a daemon takes it.", metavar="SECTION.NAME=VALUE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show every setting, its value and where it comes from; the output is a settings file."""
    from .config import show

    show(file, assignments or [], as_json=as_json)
