"""Checks single answers of bookies, between clients and their transports.

Most wrong answers harm no client at once: another replica is asked, or a later check repairs what was lost. So each answer
is checked when it arrives:

* a bookie does not deny an entry that it has acknowledged, whatever became of its disk since (rule 8);
* a bookie that has answered a fence takes no add of a writer any more, also after restarts and deletion (rules 6, 7), and
  those of recoveries until then;
* a read-only bookie serves reads and fences (rule 12).

The history compares the recorded acknowledgements with the ensembles in the metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from magnetar.ledger import TcpTransport
from magnetar.proto.commands import ADD_ACCEPTED
from magnetar.proto.errors import (
    BookieReadOnly,
    EntryDamaged,
    EntryNotFound,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
)
from magnetar.proto.stripe import EVERY_ENTRY
from sim.deliveries import Violation
from support.sim import current_process

_ANSWERS = (EntryNotFound, EntryDamaged, LedgerNotFound)  # of a bookie that has fenced


class AnswerChecker:
    """All answers of one run."""

    def __init__(self) -> None:
        self.deleting: Callable[[int], bool] = lambda ledger_id: False  # whether a ledger may be deleted
        # Whether a bookie may have forgotten a deleted ledger, by its name and the ledger.
        self.may_be_forgotten: Callable[[str, int], bool] = lambda bookie, ledger_id: False
        # Called for each add that is sent: name of the process, bookie, ledger, whether it is a recovery's.
        self.on_add: Callable[[str, str, int, bool], None] = lambda *add: None
        # Called for each answer to a fence: name of the process, bookie.
        self.on_fenced: Callable[[str, str], None] = lambda *fenced: None
        self.outstanding: dict[
            tuple[str, str], int
        ] = {}  # (process, bookie) -> bytes of adds without an answer
        self._stored: dict[tuple[str, int], dict[int, None]] = {}  # (bookie, ledger) -> entries acknowledged
        self._fenced: dict[tuple[str, int], None] = {}
        self._acks: dict[tuple[int, int], list[str]] = {}  # of entries of a writer, until they are confirmed

    def acks(self, ledger_id: int, entry_id: int) -> list[str]:
        """The bookies that acknowledged the entry to its writer; called once, when the entry is confirmed."""
        return self._acks.pop((ledger_id, entry_id), [])

    def holds(self, bookie: str, ledger_id: int, entry_id: int) -> bool:
        """Whether it has acknowledged the entry to anybody."""
        return entry_id in self._stored.get((bookie, ledger_id), ())

    def knows(self, bookie: str, ledger_id: int) -> bool:
        """Whether it has acknowledged an entry of the ledger."""
        return (bookie, ledger_id) in self._stored

    def stored(self, bookie: str, ledger_id: int, entry_id: int, *, recovery: bool, fenced: bool) -> None:
        """A bookie acknowledged an entry. `fenced`: the ledger was fenced there when the add was sent."""
        if fenced and not recovery and not self.may_be_forgotten(bookie, ledger_id):
            raise Violation(
                f"ledger {ledger_id}: {bookie} took entry {entry_id} from the writer although it had been fenced"
            )
        self._stored.setdefault((bookie, ledger_id), {})[entry_id] = None
        if not recovery:
            self._acks.setdefault((ledger_id, entry_id), []).append(bookie)

    def fenced(self, bookie: str, ledger_id: int) -> bool:
        """Whether it has answered a fence."""
        return (bookie, ledger_id) in self._fenced

    def fences(self, bookie: str) -> list[int]:
        """Ledgers that the bookie has confirmed to be fenced."""
        return [ledger_id for name, ledger_id in self._fenced if name == bookie]

    def fence_answered(self, bookie: str, ledger_id: int) -> None:
        """Records a fence, which has to hold from now on."""
        self._fenced[bookie, ledger_id] = None

    def failed(self, bookie: str, ledger_id: int, error: MagnetarError, *, fence: bool, denies: bool) -> None:
        """A request failed; `denies`: "not found" would be wrong."""
        if isinstance(error, BookieReadOnly):
            raise Violation(
                f"{bookie} is read-only and refused to {'fence' if fence else 'read'} ledger {ledger_id}"
            )
        if denies and isinstance(error, EntryNotFound | LedgerNotFound) and not self.deleting(ledger_id):
            raise Violation(f"ledger {ledger_id}: {bookie} denied what it had acknowledged: {error.message}")
        if fence and isinstance(error, _ANSWERS):
            self.fence_answered(bookie, ledger_id)


class CheckedTransport(TcpTransport):
    """The TCP transport; each answer goes through the checker."""

    def __init__(self, answers: AnswerChecker, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._checker = answers
        process = current_process()
        self._process = process.name if process is not None else ""

    def add(  # whatever else an add can have
        self,
        bookie: str,
        entry: bytes,
        ledger_id: int,
        entry_id: int,
        *,
        recovery: bool,
        done: Any,
        **more: Any,
    ) -> None:
        """See BookieTransport."""
        answers = self._checker
        fenced = answers.fenced(bookie, ledger_id)
        answers.on_add(self._process, bookie, ledger_id, recovery)

        outstanding, way, size = answers.outstanding, (self._process, bookie), len(entry)
        outstanding[way] = outstanding.get(way, 0) + size

        def answered(name: str, ledger: int, number: int, code: int) -> None:
            if code != ADD_ACCEPTED:  # a deferred add is answered twice
                outstanding[way] -= size
            try:
                if recovery and code == LedgerFenced.code and not answers.deleting(ledger):
                    raise Violation(f"ledger {ledger}: {name} refused entry {number} to a recovery as fenced")
                if not code:
                    answers.stored(name, ledger, number, recovery=recovery, fenced=fenced)
            except Violation as error:  # a connection would take it for the fault of its peer
                asyncio.get_running_loop().call_exception_handler({"message": "add", "exception": error})
            done(name, ledger, number, code)

        super().add(bookie, entry, ledger_id, entry_id, recovery=recovery, done=answered, **more)

    async def read(self, bookie: str, ledger_id: int, first: int, last: int, **more: Any) -> Any:
        """See BookieTransport."""
        fence = more.get("fence", False)
        stripe = more.get("stripe", EVERY_ENTRY)
        begin = next((entry_id for entry_id in range(first, last + 1) if stripe.holds(entry_id)), first)
        held = self._checker.holds(bookie, ledger_id, begin)
        try:
            result = await super().read(bookie, ledger_id, first, last, **more)
        except MagnetarError as error:
            self._checker.failed(bookie, ledger_id, error, fence=fence, denies=held)
            raise
        if fence:
            self._checker.fence_answered(bookie, ledger_id)
        return result

    async def read_last_confirmed(self, bookie: str, ledger_id: int, *, fence: bool = False) -> Any:
        """See BookieTransport."""
        known = self._checker.knows(bookie, ledger_id)
        try:
            result = await super().read_last_confirmed(bookie, ledger_id, fence=fence)
            if fence:
                self._checker.on_fenced(self._process, bookie)
        except MagnetarError as error:
            self._checker.failed(bookie, ledger_id, error, fence=fence, denies=known)
            raise
        if fence:
            self._checker.fence_answered(bookie, ledger_id)
        return result
