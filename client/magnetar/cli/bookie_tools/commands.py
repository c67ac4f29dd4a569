"""`magnetar bookie SUBCOMMAND`: names, options and help of the operator's commands. The work is in bookie_tools_*.

Plain `magnetar bookie [flags]` is the daemon: see `main.main`, which sends it past typer. Commands that take --bookie ask a
bookie that runs, also when --data names its directory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..terminal.command import with_options
from ..terminal.options import Json, Yes
from .target import Target

tools_app = typer.Typer(no_args_is_help=False, rich_markup_mode="rich")
journal_app = typer.Typer(no_args_is_help=True, help="The journals: what a start would replay.")
entrylog_app = typer.Typer(no_args_is_help=True, help="The entry logs: where entries stay.")
index_app = typer.Typer(no_args_is_help=True, help="The index: where each entry is.")
_LOOK = "Look at a bookie, running or stopped"
_CHANGE = "Change a bookie"
tools_app.add_typer(journal_app, name="journal", rich_help_panel=_LOOK)
tools_app.add_typer(entrylog_app, name="entrylog", rich_help_panel=_LOOK)
tools_app.add_typer(index_app, name="index", rich_help_panel=_CHANGE)

Data = Annotated[
    str | None,
    typer.Option(
        "--data", help="Data directory, as the daemon was given it; ./data by default.", metavar="DIR"
    ),
]
Config = Annotated[
    str | None,
    typer.Option("--config", help="The daemon's settings in TOML; also MAGNETAR_CONFIG.", metavar="FILE"),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="As the daemon takes it; may be repeated.", metavar="SECTION.NAME=VALUE"),
]
Running = Annotated[
    str | None,
    typer.Option(
        "--bookie",
        help="Ask the bookie that answers HTTP there, in place of --data.",
        metavar="HOST:PORT",
    ),
]
JsonLines = Annotated[bool, typer.Option("--json", help="JSON lines on standard output, for scripts.")]


# Does the work, with the same parameters behind the target.
Work = Callable[..., None]


def tool(
    app: typer.Typer, name: str, panel: str | None = None, *, running: bool = True, json: Any = Json
) -> Callable[[Callable[..., Work]], None]:
    """A command of `app`: with the options that say which bookie is meant, and --json.

    `running`: it may be a bookie that runs. The function imports and returns what does the work.
    """

    def add(command: Callable[..., Work]) -> None:
        def run(
            data: str | None,
            config: str | None,
            assignments: list[str] | None,
            bookie: str | None = None,
            **values: Any,
        ) -> None:
            wanted = {name: value for name, value in values.items() if name != "as_json"}
            command(**wanted)(Target(data, config, assignments, bookie), **values)

        more: dict[str, tuple[Any, Any]] = {"bookie": (Running, None)} if running else {}
        more |= {"data": (Data, None), "config": (Config, None), "assignments": (Set, None)}
        app.command(name, rich_help_panel=panel)(with_options(run, command, **more, as_json=(json, False)))

    return add


@tool(tools_app, "info", _LOOK)
def info() -> Work:
    """Identity, directories, sizes, mark, read-only: the first look."""
    from .identity import info

    return info


@tool(tools_app, "ledgers", _LOOK, json=JsonLines)
def ledgers(
    ledger: Annotated[
        int | None, typer.Option("--ledger", min=0, help="This one in detail.", metavar="N")
    ] = None,
) -> Work:
    """What each ledger has here, if the bookie runs: state, last entry, last add confirmed, entries, bytes, entry logs."""
    from .ledgers import ledgers

    return ledgers


@tool(tools_app, "read", _LOOK, json=JsonLines)
def read(
    ledger: Annotated[int, typer.Argument(min=0, metavar="LEDGER")],
    entries: Annotated[
        str, typer.Argument(metavar="FIRST[-LAST]", help="Entry ids; all without it.", show_default=False)
    ] = "",
    as_hex: Annotated[bool, typer.Option("--hex", help="Payloads as a hex dump.")] = False,
    messages: Annotated[
        bool, typer.Option("--messages", help="Decode what Magnetar's brokers wrote, down to the messages.")
    ] = False,
    raw: Annotated[
        str | None,
        typer.Option("--raw", help="Write the payloads, one after another, to this file.", metavar="FILE"),
    ] = None,
) -> Work:
    """Entries of a ledger, if the bookie runs: header, digest check, payload. Exit code 1 if one is damaged."""
    from .read import read

    return read


@tool(journal_app, "dump", json=JsonLines)
def journal_dump(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="One journal file; all without it.", show_default=False)
    ] = "",
    journal: Annotated[
        int | None, typer.Option("--journal", min=0, help="Only this journal directory.", metavar="N")
    ] = None,
    from_mark: Annotated[bool, typer.Option("--from-mark", help="Only what a start would replay.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Files and gaps, no records.")] = False,
) -> Work:
    """The mark, every file, its records, and what a start makes of each gap: clean end, torn tail or damage."""
    from .dump import journal as work

    return work


@tool(entrylog_app, "dump", json=JsonLines)
def entrylog_dump(
    log: Annotated[
        str, typer.Argument(metavar="LOG", help="A log id (hexadecimal, as in its name) or a path.")
    ],
    summary: Annotated[bool, typer.Option("--summary", help="Statistics and damage, no records.")] = False,
) -> Work:
    """Header, records with whether the index points to them, damage, footer, bytes by ledger."""
    from .dump import entry_log

    return entry_log


@tool(index_app, "rebuild", running=False)
def index_rebuild(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only read the logs and say what would be in it.")
    ] = False,
    yes: Yes = False,
) -> Work:
    """Make the index anew from the entry logs. The old one stays until the new one is complete."""
    from .verify import rebuild

    return rebuild


@tool(tools_app, "verify", _LOOK)
def verify() -> Work:
    """Check every byte that a start or a scrub would. Exit code 0: sound; 1: damage. A torn tail is no damage."""
    from .verify import verify

    return verify


@tool(tools_app, "convert-to-read-only", _CHANGE)
def convert_to_read_only(
    undo: Annotated[bool, typer.Option("--undo", help="Writable again.")] = False,
    reason: Annotated[
        str, typer.Option("--reason", help="What the bookie tells who asks why.", metavar="TEXT")
    ] = "",
) -> Work:
    """The bookie takes no adds, now and after restarts; reads, fencing and recoveries go on."""
    from .identity import convert_to_read_only

    return convert_to_read_only


@tool(tools_app, "cookie", _CHANGE)
def cookie(
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 if a start would refuse what it finds.")
    ] = False,
    lost: Annotated[
        str | None,
        typer.Option(
            "--lost-directory",
            help="This ledger directory is lost for good: what was in it is damage, the bookie starts without it.",
            metavar="DIR",
        ),
    ] = None,
    moved: Annotated[
        str | None,
        typer.Option(
            "--moved-directory", help="The disk that was mounted at OLD is at NEW now.", metavar="OLD=NEW"
        ),
    ] = None,
    new_disks: Annotated[
        str | None,
        typer.Option(
            "--accept-new-disk",
            help="All disks of this bookie are lost; empty ones take their place. It starts in repair mode: nothing that "
            "it may have held is said not to exist.",
            metavar="BOOKIE_ID",
        ),
    ] = None,
    yes: Yes = False,
) -> Work:
    """Whose data this is, on which directories it is spread; and what to tell a bookie that lost some of them."""
    from .identity import cookie

    return cookie
