"""What bookies answered to whom, seen between clients and their transports, and the rules that single answers must obey.

Most broken answers hurt no client at once: another replica is asked, or a later check repairs what was lost. So each is
looked at when it comes:

* a bookie does not deny an entry that it has acknowledged, whatever became of its disk since (rule 8);
* a bookie that has answered a fence takes no add of a writer any more, also after restarts and deletion (rules 6, 7), and
  those of recoveries until then;
* a read-only bookie serves reads and fences (rule 12).

Who acknowledged what is kept for the history, which compares it with the ensembles in the metadata.
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
from sim.history import Violation
from support.sim import current_process

_ANSWERS = (EntryNotFound, EntryDamaged, LedgerNotFound)  # of a bookie that has fenced


class Witness:
    """Of one run."""

    def __init__(self) -> None:
        self.deleting: Callable[[int], bool] = lambda ledger_id: False  # whether a ledger may be gone
        # Told of each add that is sent: name of the process, bookie, ledger, whether it is a recovery's.
        self.on_add: Callable[[str, str, int, bool], None] = lambda *add: None
        # Told of each answer to a fence: name of the process, bookie.
        self.on_fenced: Callable[[str, str], None] = lambda *fenced: None
        self.outstanding: dict[
            tuple[str, str], int
        ] = {}  # (process, bookie) -> bytes of adds without an answer
        self._stored: dict[tuple[str, int], dict[int, None]] = {}  # (bookie, ledger) -> entries acknowledged
        self._fenced: dict[tuple[str, int], None] = {}
        self._acks: dict[tuple[int, int], list[str]] = {}  # of entries of a writer, until they are confirmed

    def acks(self, ledger_id: int, entry_id: int) -> list[str]:
        """The bookies that told the writer that they have the entry; to be asked once, when it is confirmed."""
        return self._acks.pop((ledger_id, entry_id), [])

    def holds(self, bookie: str, ledger_id: int, entry_id: int) -> bool:
        """Whether it has acknowledged the entry to anybody."""
        return entry_id in self._stored.get((bookie, ledger_id), ())

    def knows(self, bookie: str, ledger_id: int) -> bool:
        """Whether it has acknowledged an entry of the ledger."""
        return (bookie, ledger_id) in self._stored

    def stored(self, bookie: str, ledger_id: int, entry_id: int, *, recovery: bool, fenced: bool) -> None:
        """A client was told that the bookie has the entry; `fenced`: so was it when the add was sent."""
        if fenced and not recovery:
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
        """Ledgers that it has told to be fenced."""
        return [ledger_id for name, ledger_id in self._fenced if name == bookie]

    def fence_answered(self, bookie: str, ledger_id: int) -> None:
        """From now on it has to hold."""
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


class WatchedTransport(TcpTransport):
    """The real one; each answer passes by the witness."""

    def __init__(self, witness: Witness, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._witness = witness
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
        witness = self._witness
        fenced = witness.fenced(bookie, ledger_id)
        witness.on_add(self._process, bookie, ledger_id, recovery)

        outstanding, way, size = witness.outstanding, (self._process, bookie), len(entry)
        outstanding[way] = outstanding.get(way, 0) + size

        def answered(name: str, ledger: int, number: int, code: int) -> None:
            if code != ADD_ACCEPTED:  # a deferred add is answered twice
                outstanding[way] -= size
            try:
                if recovery and code == LedgerFenced.code and not witness.deleting(ledger):
                    raise Violation(f"ledger {ledger}: {name} refused entry {number} to a recovery as fenced")
                if not code:
                    witness.stored(name, ledger, number, recovery=recovery, fenced=fenced)
            except Violation as error:  # a connection would take it for the fault of its peer
                asyncio.get_running_loop().call_exception_handler({"message": "add", "exception": error})
            done(name, ledger, number, code)

        super().add(bookie, entry, ledger_id, entry_id, recovery=recovery, done=answered, **more)

    async def read(self, bookie: str, ledger_id: int, first: int, last: int, **more: Any) -> Any:
        """See BookieTransport."""
        fence = more.get("fence", False)
        stripe = more.get("stripe", EVERY_ENTRY)
        begin = next((entry_id for entry_id in range(first, last + 1) if stripe.holds(entry_id)), first)
        held = self._witness.holds(bookie, ledger_id, begin)
        try:
            result = await super().read(bookie, ledger_id, first, last, **more)
        except MagnetarError as error:
            self._witness.failed(bookie, ledger_id, error, fence=fence, denies=held)
            raise
        if fence:
            self._witness.fence_answered(bookie, ledger_id)
        return result

    async def read_last_confirmed(self, bookie: str, ledger_id: int, *, fence: bool = False) -> Any:
        """See BookieTransport."""
        known = self._witness.knows(bookie, ledger_id)
        try:
            result = await super().read_last_confirmed(bookie, ledger_id, fence=fence)
            if fence:
                self._witness.on_fenced(self._process, bookie)
        except MagnetarError as error:
            self._witness.failed(bookie, ledger_id, error, fence=fence, denies=known)
            raise
        if fence:
            self._witness.fence_answered(bookie, ledger_id)
        return result
