"""Runs the text scenarios of the ledger cores: a command, `----`, and what the core wants done.

    append 2
    ----
    add 0 to a b
    add 1 to b c
    = writing lac=-1 pushed=1

Commands for a writer: writer, append N, stored BOOKIE ENTRY..., failed BOOKIE ENTRY ERROR, chosen POSITION=BOOKIE...,
no-bookies, written, found STATE [ensembles=...] [last=N length=N], metadata-failed, close, deleted, idle, lac-written N,
retry [expired]. With deferred sync (`writer ... deferred=BYTES`) also: accepted BOOKIE ENTRY..., force.
For a recovery: recovery ... [accepted-end=N], lac BOOKIE N|ERROR, read BOOKIE ENTRY|FIRST..LAST yes|ERROR, slow BOOKIE,
and stored, failed, chosen, no-bookies, written, found, metadata-failed as above. Payloads have 10 bytes each.
`check()` runs after every command.
"""

from __future__ import annotations

from dataclasses import replace

from magnetar.ledger.core.deferred import DeferredSync
from magnetar.ledger.core.events import (
    Accepted,
    AddFailed,
    AddStored,
    BookiesChosen,
    BookieSlow,
    ChooseBookies,
    CloseRequested,
    Confirm,
    EntriesRead,
    EntryRead,
    Event,
    ExplicitLacWritten,
    Failed,
    Finished,
    ForceAdds,
    ForceRequested,
    IdleTick,
    Instruction,
    LastConfirmedRead,
    LedgerDeleted,
    MetadataFailed,
    MetadataFound,
    MetadataWritten,
    NoBookies,
    ReadEntries,
    ReadLastConfirmed,
    ReadMetadata,
    RetryDue,
    RetryLater,
    SendAdds,
    WriteExplicitLac,
    WriteMetadata,
)
from magnetar.ledger.core.metadata import Ensemble, LedgerMetadata, LedgerState
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryCore
from magnetar.ledger.core.writer import WriterCore
from magnetar.proto import errors
from magnetar.proto.ledger_entry import encode_ledger_entry
from support.text_scenarios import play

PAYLOAD = b"x" * 10
LEDGER_ID = 7
SHOWN_READS = 7  # recovery reads a window of many entries ahead; the first ones tell enough


def run_scenario(text: str) -> str:
    """The text with the output parts as the cores produce them."""
    return play(text, _Scenario().run)


def entry_read(bookie: str, entry_id: int, entry: bytes, length: int, code: int) -> EntriesRead:
    """The answer of a bookie that says something of one entry."""
    return EntriesRead(bookie, [EntryRead(entry_id, entry, length, code)])


def parse_code(text: str) -> int:
    """An error code by the name of its class."""
    code: int = getattr(errors, text).code
    return code


class _Scenario:
    def __init__(self) -> None:
        self.writer: WriterCore | None = None
        self.deferred: DeferredSync | None = None
        self.recovery: RecoveryCore | None = None
        self.last_write: WriteMetadata | None = None
        self.version = 0

    def run(self, line: str) -> list[str]:
        name, *arguments = line.split()
        options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
        if name in ("writer", "recovery"):
            return self.start(name, options)
        if name == "append":
            return self.append(int(arguments[0]))
        if name == "accepted":
            return self.accepted(arguments[0], [int(argument) for argument in arguments[1:]])
        if name == "stored" and self.writer is not None:
            return self.stored(arguments[0], [int(argument) for argument in arguments[1:]])
        if name == "stored":
            return self.tell([AddStored(arguments[0], int(argument)) for argument in arguments[1:]])
        if name == "read" and ".." in arguments[1]:
            first, last = map(int, arguments[1].split(".."))
            each = [[arguments[0], str(entry_id), arguments[2]] for entry_id in range(first, last + 1)]
            return self.tell([self.event(name, one, {}) for one in each])
        return self.tell([self.event(name, arguments, options)])

    def start(self, kind: str, options: dict[str, str]) -> list[str]:
        e, qw, qa = (int(number) for number in options["quorums"].split("/"))
        ensembles = parse_ensembles(options["ensembles"])
        metadata = LedgerMetadata.create(Striping(e, qw, qa), ensembles[0].bookies, 0, {})
        metadata = replace(metadata, ensembles=ensembles, state=LedgerState[options.get("state", "OPEN")])
        if kind == "writer":
            self.writer = WriterCore(LEDGER_ID, metadata, self.version)
            if "deferred" in options:
                limit = int(options["deferred"])
                self.deferred = DeferredSync(self.writer, limit)
            return self.after([])
        accepted_end = int(options["accepted-end"]) if "accepted-end" in options else None
        self.recovery = RecoveryCore(LEDGER_ID, metadata, self.version, accepted_end=accepted_end)
        return self.after(self.recovery.begin())

    def append(self, count: int) -> list[str]:
        writer = self.writer
        assert writer is not None
        lines = []
        for _ in range(count):
            if (refusal := writer.refusal()) is not None:
                lines.append(f"refused: {type(refusal).__name__}")
                continue
            _, bookies = writer.append(PAYLOAD, None)
            lines.append(
                f"add {writer.last_add_pushed} " + (f"to {' '.join(bookies)}" if bookies else "held")
            )
        return lines + self.after([])

    def stored(self, bookie: str, entries: list[int]) -> list[str]:
        writer = self.writer
        assert writer is not None
        lines: list[str] = []
        for entry_id in entries:
            confirmed = (self.deferred or writer).stored(bookie, entry_id)
            if confirmed:
                first = writer.last_add_confirmed - len(confirmed) + 1
                lines += self.show(Confirm(first, confirmed, None))
            lines += self.answered()
            for instruction in writer.drained():
                lines += self.show(instruction)
        return lines + self.after([])

    def accepted(self, bookie: str, entries: list[int]) -> list[str]:
        deferred = self.deferred
        assert deferred is not None
        lines: list[str] = []
        for entry_id in entries:
            if adds := deferred.accepted(bookie, entry_id):
                lines += self.show(Accepted(deferred.last_add_accepted - len(adds) + 1, adds))
        return lines + self.after([])

    def answered(self) -> list[str]:
        deferred = self.deferred
        if deferred is not None and (adds := deferred.take()):
            return self.show(Accepted(deferred.last_add_accepted - len(adds) + 1, adds))
        return []

    def event(self, name: str, arguments: list[str], options: dict[str, str]) -> Event:
        match name:
            case "failed":
                return AddFailed(arguments[0], int(arguments[1]), parse_code(arguments[2]))
            case "chosen":
                return BookiesChosen({int(position): bookie for position, bookie in options.items()})
            case "no-bookies":
                return NoBookies("none is left")
            case "written":
                self.version += 1
                return MetadataWritten(self.version)
            case "found":
                return self.found(arguments[0], options)
            case "metadata-failed":
                return MetadataFailed(errors.StorageFailed("the disk has failed"))
            case "close":
                return CloseRequested()
            case "force":
                return ForceRequested()
            case "deleted":
                return LedgerDeleted()
            case "idle":
                return IdleTick()
            case "retry":
                return RetryDue(bool(arguments))
            case "lac-written":
                return ExplicitLacWritten(int(arguments[0]))
            case "slow":
                return BookieSlow(arguments[0])
            case "lac":
                known = arguments[1].lstrip("-").isdigit()
                return LastConfirmedRead(
                    arguments[0],
                    int(arguments[1]) if known else -1,
                    0 if known else parse_code(arguments[1]),
                )
            case "read":
                entry_id = int(arguments[1])
                if arguments[2] != "yes":
                    return entry_read(arguments[0], entry_id, b"", 0, parse_code(arguments[2]))
                length = (entry_id + 1) * len(PAYLOAD)
                entry = encode_ledger_entry(LEDGER_ID, entry_id, -1, length, PAYLOAD)
                return entry_read(arguments[0], entry_id, entry, length, 0)
            case _:
                raise AssertionError(f"unknown command: {name}")

    def found(self, state: str, options: dict[str, str]) -> MetadataFound:
        self.version += 1
        core = self.writer or self.recovery
        assert core is not None
        metadata = replace(core.metadata, state=LedgerState[state])
        if "ensembles" in options:
            metadata = replace(metadata, ensembles=parse_ensembles(options["ensembles"]))
        if "last" in options:
            metadata = replace(metadata, last_entry=int(options["last"]), length=int(options["length"]))
        return MetadataFound(metadata, self.version)

    def tell(self, events: list[Event]) -> list[str]:
        core = self.deferred or self.writer or self.recovery
        assert core is not None
        instructions: list[Instruction] = []
        for event in events:
            instructions += core.handle(event)
        return self.after(instructions)

    def after(self, instructions: list[Instruction]) -> list[str]:
        lines = [line for instruction in instructions for line in self.show(instruction)]
        if self.writer is not None:
            w = self.writer
            w.check()
            accepted = ""
            if (d := self.deferred) is not None:
                d.check()
                accepted = f" accepted={d.last_add_accepted}" + (" wants-force" if d.wants_force else "")
            lines.append(f"= {w.state.value} lac={w.last_add_confirmed} pushed={w.last_add_pushed}{accepted}")
        if self.recovery is not None:
            self.recovery.check()
            lines.append(f"= {self.recovery.state.value}")
        return lines

    def show(self, instruction: Instruction) -> list[str]:
        match instruction:
            case SendAdds(bookie, adds):
                return [f"send {' '.join(str(entry_id) for entry_id, _ in adds)} to {bookie}"]
            case Confirm(first, adds, error):
                last = first + len(adds) - 1
                return [f"confirm {first}..{last}" + (f": {type(error).__name__}" if error else "")]
            case ChooseBookies(positions, exclude):
                return [f"choose for positions {' '.join(map(str, positions))}, not {' '.join(exclude)}"]
            case WriteMetadata(metadata, version):
                return [f"write {show_metadata(metadata)} at version {version}"]
            case Accepted(first, adds):
                return [f"accept {first}..{first + len(adds) - 1}"]
            case ForceAdds(bookies):
                return [f"force {' '.join(bookies)}"]
            case RetryLater():
                return ["retry later"]
            case ReadMetadata():
                return ["read metadata"]
            case WriteExplicitLac(bookies, last_add_confirmed):
                return [f"tell lac {last_add_confirmed} to {' '.join(bookies)}"]
            case ReadLastConfirmed(bookie):
                return [f"fence {bookie}"]
            case ReadEntries(bookie, first, last, stripe):
                ids = stripe.ids(first, min(last, SHOWN_READS - 1))
                return [f"read {entry_id} from {bookie}" for entry_id in ids]
            case Finished(metadata):
                return [f"finished: {show_metadata(metadata)}"]
            case Failed(error):
                return [f"failed: {type(error).__name__}"]


def parse_ensembles(text: str) -> tuple[Ensemble, ...]:
    """`0:a,b,c;5:a,d,c`."""
    parts = (part.split(":") for part in text.split(";"))
    return tuple(Ensemble(int(first), tuple(bookies.split(","))) for first, bookies in parts)


def show_metadata(metadata: LedgerMetadata) -> str:
    """State, ensembles, and the end once closed."""
    ensembles = ";".join(f"{e.first_entry}:{','.join(e.bookies)}" for e in metadata.ensembles)
    end = f" last={metadata.last_entry} length={metadata.length}" if metadata.closed else ""
    return f"{metadata.state.name} {ensembles}{end}"
