"""Runs the text scenarios of the cores of self-repair: a command, `----`, and what the core wants done.

For an auditor (tests/scenarios/repair_audit_*.txt): auditor delay=S, at S, bookies NAME... [known=A,B] [draining=A,B],
ended done|failed, check. For the repair of a ledger (repair_ledger_*.txt): repair quorums=E/QW/QA ensembles=0:a,b;10:c,b
[state=OPEN] [last=N] [lost=A] [draining=A] [check=A] [placement] grace=S, view NAME... [draining=A,B], at S, found (the
record as the core last saw it, with changes: ensembles= state= last=), chosen POSITION=BOOKIE..., no-bookies, copied,
failed [BOOKIE], checked, written, deleted, metadata-failed, recovery-failed. `check()` runs after every command.
"""

from __future__ import annotations

from dataclasses import replace

from magnetar.ledger.core.events import (
    BookiesChosen,
    ChooseBookies,
    MetadataFailed,
    MetadataFound,
    MetadataWritten,
    NoBookies,
    ReadMetadata,
    WriteMetadata,
)
from magnetar.ledger.core.metadata import Ensemble, LedgerMetadata, LedgerState
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.replication.core.audit import (
    AuditorCore,
    BookiesListed,
    CancelPass,
    CheckRequested,
    PassEnded,
    StartPass,
    TimeReached,
    WakeAt,
)
from magnetar.ledger.replication.core.audit import Instruction as AuditInstruction
from magnetar.ledger.replication.core.repair import (
    CheckCopies,
    Checked,
    ChooseCompliant,
    ClusterView,
    Copied,
    CopiesFailed,
    CopyEntries,
    DeleteCopies,
    Event,
    Instruction,
    Postponed,
    RecoverLedger,
    RecoveryFailed,
    RepairCore,
    Repaired,
    RepairState,
)
from magnetar.ledger.replication.core.request import Reason, RepairRequest
from magnetar.proto.errors import LedgerNotFound, RequestTimeout
from support.text_scenarios import play

LEDGER_ID = 7


def run_scenario(text: str) -> str:
    """The text with the output parts as the cores produce them."""
    return play(text, _Scenario().run)


class _Scenario:
    def __init__(self) -> None:
        self.now = 0.0
        self.auditor: AuditorCore | None = None
        self.repair: RepairCore | None = None
        self.view = ClusterView({}, {})
        self.metadata: LedgerMetadata | None = None
        self.version = 0

    def run(self, line: str) -> list[str]:
        name, *rest = line.split()
        options = dict(word.split("=", 1) for word in rest if "=" in word)
        words = [word for word in rest if "=" not in word]
        if name == "at":
            self.now = float(words[0])
            return self.audit(TimeReached()) if self.auditor is not None else []
        if name == "auditor":
            self.auditor = AuditorCore(float(options["delay"]))
            return []
        if name == "repair":
            return self.start(words, options)
        if name == "view":
            self.view = ClusterView(dict.fromkeys(words), dict.fromkeys(_names(options.get("draining", ""))))
            return []
        if self.auditor is not None:
            return self.audit(self.audit_event(name, words, options))
        return self.step(self.repair_event(name, words, options))

    # --- the auditor -------------------------------------------------------------------------------------------------

    def audit_event(
        self, name: str, words: list[str], options: dict[str, str]
    ) -> BookiesListed | PassEnded | CheckRequested:
        if name == "bookies":
            return BookiesListed(
                tuple(words), _names(options.get("known", "")), _names(options.get("draining", ""))
            )
        return PassEnded(words == ["done"]) if name == "ended" else CheckRequested()

    def audit(self, event: BookiesListed | PassEnded | CheckRequested | TimeReached) -> list[str]:
        assert self.auditor is not None
        instructions = self.auditor.handle(event, self.now)
        self.auditor.check()
        figures = self.auditor.figures()
        return [
            *(_audit_text(instruction) for instruction in instructions),
            "= " + " ".join(f"{name.removeprefix('bookies_')}={count}" for name, count in figures.items()),
        ]

    # --- the repair of a ledger --------------------------------------------------------------------------------------

    def start(self, words: list[str], options: dict[str, str]) -> list[str]:
        e, qw, qa = (int(number) for number in options["quorums"].split("/"))
        ensembles = _ensembles(options["ensembles"])
        metadata = LedgerMetadata.create(Striping(e, qw, qa), ensembles[0].bookies, 0, {})
        self.metadata = _with(replace(metadata, ensembles=ensembles), {"state": "CLOSED", **options})
        bookies = {bookie: reason for reason in Reason for bookie in _names(options.get(reason.value, ""))}
        grace = None if self.repair is None else self.repair.grace  # as a worker remembers it
        self.repair = RepairCore(
            LEDGER_ID, RepairRequest(bookies, "placement" in words), float(options.get("grace", "30")), grace
        )
        return self.after(self.repair.begin())

    def repair_event(self, name: str, words: list[str], options: dict[str, str]) -> Event:
        match name:
            case "found":
                assert self.metadata is not None
                self.metadata = _with(self.metadata, options)
                self.version += 1
                return MetadataFound(self.metadata, self.version)
            case "written":
                self.version += 1
                return MetadataWritten(self.version)
            case "chosen":
                return BookiesChosen({int(position): bookie for position, bookie in options.items()})
            case "no-bookies":
                return NoBookies("1 of the 3 writable bookies are left to choose from")
            case "copied":
                return Copied()
            case "failed":
                return CopiesFailed("it stays silent", tuple(words))
            case "checked":
                return Checked()
            case "deleted":
                return MetadataFailed(LedgerNotFound("deleted"))
            case "metadata-failed":
                return MetadataFailed(RequestTimeout("the store is silent"))
            case "recovery-failed":
                return RecoveryFailed("too few bookies answer")
        raise AssertionError(f"not a command: {name}")

    def step(self, event: Event) -> list[str]:
        assert self.repair is not None
        return self.after(self.repair.handle(event, self.now, self.view))

    def after(self, instructions: list[Instruction]) -> list[str]:
        assert self.repair is not None
        self.repair.check()
        for instruction in instructions:
            if isinstance(instruction, WriteMetadata):
                self.metadata = instruction.metadata
        lines = [_text(instruction) for instruction in instructions]
        ended = self.repair.state in (RepairState.DONE, RepairState.POSTPONED)
        return lines if ended else [*lines, f"= {self.repair.state.value}"]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _ensembles(text: str) -> tuple[Ensemble, ...]:
    parts = (part.split(":") for part in text.split(";"))
    return tuple(Ensemble(int(first), tuple(bookies.split(","))) for first, bookies in parts)


def _with(metadata: LedgerMetadata, options: dict[str, str]) -> LedgerMetadata:
    if "ensembles" in options:
        metadata = replace(metadata, ensembles=_ensembles(options["ensembles"]))
    if "state" in options:
        metadata = replace(metadata, state=LedgerState[options["state"]])
    if metadata.closed and "last" in options:
        metadata = replace(metadata, last_entry=int(options["last"]), length=1)
    return metadata


def _shown(metadata: LedgerMetadata) -> str:
    ensembles = " ".join(f"{e.first_entry}:{','.join(e.bookies)}" for e in metadata.ensembles)
    return f"{metadata.state.name} {ensembles}"


def _text(instruction: Instruction) -> str:
    match instruction:
        case ReadMetadata():
            return "read the record"
        case ChooseBookies(positions, exclude):
            return f"choose for positions {_list(positions)}, not {_list(exclude)}"
        case ChooseCompliant(bookies, _):
            return f"choose so that {_list(bookies)} complies"
        case CopyEntries(_, fragment, targets):
            to = " ".join(f"{position}={bookie}" for position, bookie in targets.items())
            return f"copy {fragment.first} to {fragment.last} to {to}"
        case CheckCopies(_, bookie):
            return f"check what {bookie} lacks"
        case WriteMetadata(metadata, version):
            return f"write {_shown(metadata)} at version {version}"
        case RecoverLedger():
            return "recover"
        case DeleteCopies(bookies):
            return f"delete the copies at {_list(bookies)}"
        case Repaired():
            return "repaired"
        case Postponed(reason, until_s):
            return f"postponed{'' if until_s is None else f' until {until_s:g}'}: {reason}"


def _audit_text(instruction: AuditInstruction) -> str:
    match instruction:
        case StartPass(lost, draining, full, waiting):
            parts = [f"lost {_list(lost)}"] if lost else []
            parts += [f"draining {_list(draining)}"] if draining else []
            parts += ["full check"] if full else []
            parts += [f"but not {_list(waiting)}"] if full and waiting else []
            return f"pass: {', '.join(parts)}"
        case CancelPass():
            return "cancel the pass"
        case WakeAt(at):
            return "no timer" if at is None else f"wake at {at:g}"


def _list(names: tuple[object, ...]) -> str:
    return " ".join(str(name) for name in names)
