"""`magnetar bookie SUBCOMMAND`: names, options and help of the operator's commands. The work is in bookie_tools_*.

Plain `magnetar bookie [flags]` is the daemon: see `main.main`, which sends it past typer. Commands that take --bookie ask a
bookie that runs, also when --data names its directory.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .bookie_target import Target
from .options import Json, Yes

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


@tools_app.command("info", rich_help_panel=_LOOK)
def info(
    bookie: Running = None,
    data: Data = None,
    config: Config = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Identity, directories, sizes, mark, read-only: the first look."""
    from . import bookie_tools_identity as work

    work.info(Target(data, config, assignments, bookie), as_json=as_json)


@tools_app.command("ledgers", rich_help_panel=_LOOK)
def ledgers(
    ledger: Annotated[
        int | None, typer.Option("--ledger", min=0, help="This one in detail.", metavar="N")
    ] = None,
    bookie: Running = None,
    data: Data = None,
    config: Config = None,
    assignments: Set = None,
    as_json: JsonLines = False,
) -> None:
    """What each ledger has here, if the bookie runs: state, last entry, last add confirmed, entries, bytes, entry logs."""
    from . import bookie_tools_ledgers as work

    work.ledgers(Target(data, config, assignments, bookie), ledger=ledger, as_json=as_json)


@tools_app.command("read", rich_help_panel=_LOOK)
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
    bookie: Running = None,
    data: Data = None,
    config: Config = None,
    assignments: Set = None,
    as_json: JsonLines = False,
) -> None:
    """Entries of a ledger, if the bookie runs: header, digest check, payload. Exit code 1 if one is damaged."""
    from . import bookie_tools_read as work

    work.read(
        Target(data, config, assignments, bookie),
        ledger=ledger,
        entries=entries,
        as_hex=as_hex,
        messages=messages,
        raw=raw,
        as_json=as_json,
    )


@journal_app.command("dump")
def journal_dump(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="One journal file; all without it.", show_default=False)
    ] = "",
    journal: Annotated[
        int | None, typer.Option("--journal", min=0, help="Only this journal directory.", metavar="N")
    ] = None,
    from_mark: Annotated[bool, typer.Option("--from-mark", help="Only what a start would replay.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Files and gaps, no records.")] = False,
    bookie: Running = None,
    data: Data = None,
    config: Config = None,
    assignments: Set = None,
    as_json: JsonLines = False,
) -> None:
    """The mark, every file, its records, and what a start makes of each gap: clean end, torn tail or damage."""
    from . import bookie_tools_dump as work

    work.journal(
        Target(data, config, assignments, bookie),
        file=file,
        journal=journal,
        from_mark=from_mark,
        summary=summary,
        as_json=as_json,
    )


@entrylog_app.command("dump")
def entrylog_dump(
    log: Annotated[
        str, typer.Argument(metavar="LOG", help="A log id (hexadecimal, as in its name) or a path.")
    ],
    summary: Annotated[bool, typer.Option("--summary", help="Statistics and damage, no records.")] = False,
    bookie: Running = None,
    data: Data = None,
    config: Config = None,
    assignments: Set = None,
    as_json: JsonLines = False,
) -> None:
    """Header, records with whether the index points to them, damage, footer, bytes by ledger."""
    from . import bookie_tools_dump as work

    work.entry_log(Target(data, config, assignments, bookie), log=log, summary=summary, as_json=as_json)


@index_app.command("rebuild")
def index_rebuild(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only read the logs and say what would be in it.")
    ] = False,
    yes: Yes = False,
    data: Data = None,
    config: Config = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Make the index anew from the entry logs. The old one stays until the new one is complete."""
    from . import bookie_tools_verify as work

    work.rebuild(Target(data, config, assignments), dry_run=dry_run, yes=yes, as_json=as_json)


@tools_app.command("verify", rich_help_panel=_LOOK)
def verify(
    bookie: Running = None,
    data: Data = None,
    config: Config = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Check every byte that a start or a scrub would. Exit code 0: sound; 1: damage. A torn tail is no damage."""
    from . import bookie_tools_verify as work

    work.verify(Target(data, config, assignments, bookie), as_json=as_json)


@tools_app.command("convert-to-read-only", rich_help_panel=_CHANGE)
def convert_to_read_only(
    undo: Annotated[bool, typer.Option("--undo", help="Writable again.")] = False,
    reason: Annotated[
        str, typer.Option("--reason", help="What the bookie tells who asks why.", metavar="TEXT")
    ] = "",
    bookie: Running = None,
    data: Data = None,
    config: Config = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """The bookie takes no adds, now and after restarts; reads, fencing and recoveries go on."""
    from . import bookie_tools_identity as work

    work.convert_to_read_only(
        Target(data, config, assignments, bookie), undo=undo, reason=reason, as_json=as_json
    )


@tools_app.command("cookie", rich_help_panel=_CHANGE)
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
    bookie: Running = None,
    data: Data = None,
    config: Config = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Whose data this is, on which directories it is spread; and what to tell a bookie that lost some of them."""
    from . import bookie_tools_identity as work

    work.cookie(
        Target(data, config, assignments, bookie),
        check=check,
        lost=lost,
        moved=moved,
        new_disks=new_disks,
        yes=yes,
        as_json=as_json,
    )
