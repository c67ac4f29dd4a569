"""`magnetar bookie SUBCOMMAND`: the operator's commands. They print the rows that a bookie answers, or that its files give.

Plain `magnetar bookie [flags]` is the daemon: see `main.main`, which sends it past typer. Commands that take --bookie ask a
bookie that runs, also when --data names its directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magnetar.runtime.quantities import counted

from ..terminal.command import Answer
from ..terminal.options import Yes
from ..terminal.session import EXIT_FAILED, EXIT_USAGE, confirm, fail, print_json
from ..terminal.tables import Table, print_table
from ..wiring.metadata import system_rng
from .dump import entrylog_app, journal_app
from .read import read_app
from .target import CHANGE, LOOK, JsonLines, Meter, Target, figures, number, stopped_tool, table, tool

if TYPE_CHECKING:
    from magnetar.bookie.offline.index_rebuild import RebuildReport

tools_app = typer.Typer(no_args_is_help=False, rich_markup_mode="rich")
index_app = typer.Typer(no_args_is_help=True, help="The index: where each entry is.")
tools_app.add_typer(read_app)
tools_app.add_typer(journal_app, name="journal", rich_help_panel=LOOK)
tools_app.add_typer(entrylog_app, name="entrylog", rich_help_panel=LOOK)
tools_app.add_typer(index_app, name="index", rich_help_panel=CHANGE)

Row = dict[str, Any]
# In tables; --json shows all.
_LOGS_SHOWN = 4
_FINDINGS_SHOWN = 50


# --- who it is ---------------------------------------------------------------------------------------------------------


@tool(tools_app, "info", LOOK)
async def info(target: Target) -> Answer:
    """Identity, directories, sizes, mark, read-only: the first look."""
    async with target.any() as bookie:
        record = bookie.row("info")
    marks = [
        (f"mark of {name}", f"file {place['sequence']:016x}, offset {place['offset']}")
        for name, place in (record["mark"] or {}).items()
    ]
    shown = figures(
        *_named(
            record, "bookie_id", "instance", "cluster", "format_version", "data_directory", "index_directory"
        ),
        *marks,
        ("entry logs", f"{record['entry_logs']:,} with {record['entry_log_bytes']:,} bytes"),
        ("disk", f"{record['free_bytes']:,} of {record['total_bytes']:,} bytes free"),
        ("read-only", record["read_only_reason"] or "no"),
        ("runs", "yes" if record["running"] else "no"),
    )
    return Answer(
        record,
        [shown, _directories(record), *_refusal(record)],
        code=EXIT_FAILED if record["problem"] else 0,
    )


def _named(record: Row, *names: str) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), str(record[name])) for name in names]


def _refusal(record: Row) -> list[str]:
    return [f"A START WOULD BE REFUSED: {record['problem']}"] if record["problem"] else []


def _directories(record: Row) -> Table:
    """Journal and ledger directories."""
    rows = [
        (
            row["role"],
            row["path"],
            number(row["files"]) if row["exists"] else "missing",
            number(row["bytes"]) if row["exists"] else "",
            "lost" if row["lost"] else "yes" if row["known"] else "no",
            "yes" if row["in_settings"] else "no",
            row["copy"],
        )
        for row in record["directories"]
    ]
    columns = ("role", "directory", "files", "bytes", "in cookie", "in settings", "copy of the cookie")
    return table("directories", columns, rows, right=(2, 3))


@tool(
    tools_app,
    "cookie",
    CHANGE,
    exclusive={"--lost-directory": "lost", "--moved-directory": "moved", "--accept-new-disk": "new_disks"},
)
async def cookie(
    target: Target,
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
) -> Answer:
    """Whose data this is, on which directories it is spread; and what to tell a bookie that lost some of them."""
    if new_disks is not None:
        await _accept_new_disks(target, new_disks, yes)
    if lost is not None or moved is not None:
        record = await _change_cookie(target, lost, moved, yes)
    else:
        async with target.any() as bookie:
            record = bookie.row("cookie")
    repairing = (
        "it replaces a lost bookie, and no broker has registered it yet" if record["repairing"] else ""
    )
    named = _named(record, "bookie_id", "instance", "cluster", "format_version")
    return Answer(
        record,
        [
            figures(*named, ("repair mode", repairing)),
            _directories(record),
            *(_refusal(record) or ["a start would take these directories"]),
        ],
        code=EXIT_FAILED if check and record["problem"] else 0,
    )


async def _accept_new_disks(target: Target, bookie_id: str, yes: bool) -> None:
    from magnetar.bookie.offline.identity import accept_new_disks
    from magnetar.runtime.files import OsFiles

    settings = target.settings()
    if not bookie_id:
        fail("--accept-new-disk needs the id of the bookie that lost its disks", EXIT_USAGE)
    confirm(f"Are all disks of bookie {bookie_id} lost, and shall empty directories take their place?", yes)
    await accept_new_disks(settings, OsFiles(), bookie_id, system_rng())


async def _change_cookie(target: Target, lost: str | None, moved: str | None, yes: bool) -> Row:
    """The changed cookie; either directory is given."""
    from magnetar.bookie.directories import forget_ledger_directory, rename_directory
    from magnetar.bookie.offline.identity import describe_cookie

    old, equals, new = (moved or "").partition("=")
    if moved is not None and not (old and equals and new):
        fail(f"--moved-directory {moved!r} is not OLD=NEW", EXIT_USAGE)
    if target.bookie is not None:
        fail("a change of the cookie needs the bookie stopped: it takes --data, not --bookie", EXIT_USAGE)
    with await target.stopped() as bookie:
        if lost is None:
            return describe_cookie(bookie, rename_directory(bookie.files, bookie.layout, old, new))
        confirm(f"What {lost} held is damage from now on. Declare it lost?", yes)
        return describe_cookie(bookie, forget_ledger_directory(bookie.files, bookie.layout, lost))


@tool(tools_app, "convert-to-read-only", CHANGE)
async def convert_to_read_only(
    target: Target,
    undo: Annotated[bool, typer.Option("--undo", help="Writable again.")] = False,
    reason: Annotated[
        str, typer.Option("--reason", help="What the bookie tells who asks why.", metavar="TEXT")
    ] = "",
) -> Answer:
    """The bookie takes no adds, now and after restarts; reads, fencing and recoveries go on."""
    async with target.any() as bookie:
        record = bookie.row("convert-to-read-only", undo=undo, reason=reason)
    since = "now" if bookie.running else "from its next start on"
    state = f"read-only {since}: {record['read_only_reason']}" if record["read_only"] else f"writable {since}"
    return Answer(record, [f"bookie {record['bookie_id']} is {state}"])


# --- its ledgers -------------------------------------------------------------------------------------------------------


@tool(tools_app, "ledgers", LOOK, json=JsonLines)
async def ledgers(
    target: Target,
    ledger: Annotated[
        int | None, typer.Option("--ledger", min=0, help="This one in detail.", metavar="N")
    ] = None,
    as_json: bool = False,
) -> None:
    """What each ledger has here, if the bookie runs: state, last entry, last add confirmed, entries, bytes, entry logs."""
    async with target.any() as bookie:
        rows = bookie.rows("ledgers", ledger=ledger)  # "in journals" is what is in its memory
        if as_json:
            for row in rows:
                print_json(row)
        elif ledger is not None:
            print_table(*_ledger_in_detail(next(rows)))
        else:
            columns = (
                "ledger", "state", "entries", "bytes", "last entry", "LAC", "explicit LAC", "in journals", "logs",
            )  # fmt: skip
            shown = table("", columns, map(_ledger, rows), right=(0, 2, 3, 4, 5, 6, 7))
            print(counted(print_table(*shown), "ledger"))


def _state(row: Row) -> str:
    return (
        f"{row['state']}, incomplete" if row["unknown"] and row["state"] != "unknown" else str(row["state"])
    )


def _ledger(row: Row) -> tuple[str, ...]:
    logs = [f"{log_id:08x}" for log_id in row["logs"][:_LOGS_SHOWN]]
    if len(row["logs"]) > _LOGS_SHOWN:
        logs.append(f"+{len(row['logs']) - _LOGS_SHOWN}")
    return (
        str(row["ledger_id"]),
        _state(row),
        number(row["entries"] + row["journaled_entries"]),
        number(row["bytes"] + row["journaled_bytes"]),
        number(row["last_entry"]),
        number(row["last_add_confirmed"]),
        number(row["explicit_lac"]),
        number(row["journaled_entries"] or -1),
        " ".join(logs),
    )


def _ledger_in_detail(row: Row) -> Table:
    deleted_ms = row["deleted_at_ms"]
    holes = [f"{last + 1}-{first - 1}" for (_, last), (first, _) in pairwise(row["ranges"])]
    ranges = [str(first) if first == last else f"{first}-{last}" for first, last in row["ranges"]]
    return figures(
        ("ledger", str(row["ledger_id"])),
        ("state", _state(row)),
        ("deleted", datetime.fromtimestamp(deleted_ms / 1000, UTC).isoformat() if deleted_ms else ""),
        ("last entry", number(row["last_entry"])),
        ("last add confirmed", number(row["last_add_confirmed"])),
        ("explicit LAC", number(row["explicit_lac"])),
        ("entries in entry logs", number(row["entries"])),
        ("bytes in entry logs", number(row["bytes"])),
        ("entries in journals only", number(row["journaled_entries"] or -1)),
        ("entry logs", " ".join(f"{log_id:08x}" for log_id in row["logs"])),
        ("entries", " ".join(ranges)),
        ("not here", " ".join(holes)),
    )


# --- whether it is sound -----------------------------------------------------------------------------------------------


@tool(tools_app, "verify", LOOK)
async def verify(target: Target, as_json: bool = False) -> Answer:
    """Check every byte that a start or a scrub would. Exit code 0: sound; 1: damage. A torn tail is no damage."""
    async with target.any() as bookie:
        with Meter(quiet=as_json) as meter:
            result = bookie.row("verify", meter)
        root = "" if as_json else str(bookie.row("info")["data_directory"])
    shown = [*_verdict(root, result)]
    if bookie.running:
        shown.append("it runs: this is what its scrub has verified so far")
    return Answer(result, shown, code=0 if result["sound"] else EXIT_FAILED)


def _verdict(root: str, result: Row) -> Iterator[str | Table]:
    checks = [
        (
            check["part"],
            _short(root, check["path"]),
            number(check["records"]),
            number(check["bytes"] or -1),
            check["verdict"],
            check["note"],
        )
        for check in result["checks"]
    ]
    yield table("", ("part", "file", "records", "bytes", "verdict", ""), checks, right=(2, 3))
    found = result["damage_found"]
    if result["findings"]:
        shown = [
            (
                finding["part"],
                _short(root, finding["path"]),
                "" if finding["position"] < 0 else str(finding["position"]),
                ":".join(str(one) for one in (finding["ledger_id"], finding["entry_id"]) if one >= 0),
                finding["text"],
            )
            for finding in result["findings"][:_FINDINGS_SHOWN]
        ]
        yield table("damage", ("part", "file", "byte", "entry", ""), shown, right=(2,))
        if found > len(shown):
            yield f"and {found - len(shown):,} more; --json lists the first 10,000"
    if result["sound"]:
        yield "sound"
    else:
        yield f"NOT SOUND: {counted(found, 'finding') if found else 'a part could not be checked'}"


def _short(root: str, path: str) -> str:
    inside = os.path.relpath(path, root) if path else ""
    return path if inside.startswith("..") else inside


# --- its index ---------------------------------------------------------------------------------------------------------


@stopped_tool(index_app, "rebuild")
async def index_rebuild(
    target: Target,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only read the logs and say what would be in it.")
    ] = False,
    yes: Yes = False,
    as_json: bool = False,
) -> Answer:
    """Make the index anew from the entry logs. The old one stays until the new one is complete."""
    from magnetar.bookie.offline.index_rebuild import rebuild

    # Damage that is met is in the report, and the bookie reports it when it is read: the exit code is 0.
    with await target.stopped() as bookie:
        if not dry_run:
            confirm(
                f"Make {bookie.layout.index} anew from {len(bookie.logs()):,} entry logs? The old one stays beside it.",
                yes,
                refusal="this replaces the index: say --yes",
            )
        with Meter(quiet=as_json) as meter:
            report = await rebuild(bookie, dry_run=dry_run, progress=meter)
        root = bookie.layout.root
    record = {"dry_run": dry_run, **asdict(report), "damaged": [found._asdict() for found in report.damaged]}
    return Answer(record, [*_rebuilt(root, report, dry_run)])


def _rebuilt(root: str, report: RebuildReport, dry_run: bool) -> Iterator[str | Table]:
    damaged = f"{len(report.damaged):,} ranges with {report.damaged_bytes:,} bytes" if report.damaged else ""
    yield figures(
        ("entry logs", f"{report.logs:,} with {report.bytes:,} bytes"),
        ("entries", number(report.entries)),
        ("ledgers", number(report.ledgers)),
        ("state records", number(report.states)),
        ("older copies", number(report.duplicates or -1)),
        ("torn tails", f"{report.torn_bytes:,} bytes" if report.torn_bytes else ""),
        ("damaged", damaged),
        ("entries that are damaged", number(report.kept_places or -1)),
        ("incomplete ledgers", _some(report.unknown_ledgers)),
        ("the old index", report.old_index_fault),
    )
    for path, error in report.unreadable.items():
        yield f"{_short(root, path)} cannot be read: {error}"
    for found in report.damaged[:_FINDINGS_SHOWN]:
        yield f"{_short(root, found.path)} is damaged at byte {found.offset}, {found.length:,} bytes"
    if report.incomplete:
        yield "entries may be lost that nobody can name: this bookie will not say of any entry that it does not exist"
    if dry_run:
        yield "nothing was changed"
    elif report.old_index:
        yield f"the index is made anew; the old one is {report.old_index}: delete it when all is well"
    else:
        yield "the index is made anew"


def _some(ledgers: Sequence[int]) -> str:
    shown = " ".join(map(str, ledgers[:20]))
    return f"{shown} and {len(ledgers) - 20:,} more" if len(ledgers) > 20 else shown
