"""The same system as `ledger_world`, with every reduction that loses nothing; what makes the long shapes finish.

**Tables instead of copies.** The cores are functions of state and event. Cores, bookies, metadata and messages are numbered
as they come up, each (core, event) runs once, and a state of the world is a tuple of numbers. The real cores decide, but a
transition costs some look-ups.

**Fewer states.** Why none of these misses a violation:

1. *Failures are told when they happen.* `ledger_world` sends them as messages. A failure told late is the same as a request,
   or its answer, given up late: so answers in flight can be given up, too, and failures never travel.
2. *A crash happens when it is noticed*, by the first request that finds the bookie dead: from the moment before that until
   then nobody dealt with it, so nobody can tell.
3. *What changes nothing is forgotten*: answers that their receiver will ignore from now on (it is let to, and that nothing
   changed is asserted), requests nobody waits for that would find their work done, adds at bookies that no ensemble names
   any more (the change began past all that was confirmed there), re-adds nobody waits for when nobody else recovers (they
   would only add copies). Whether a bookie is fenced is forgotten when no add of the writer can come to it any more. A
   compare-and-set that comes too late is a read. Giving up what makes no difference to the sender is left out: it could as
   well stay in flight for ever.
4. *Partial order* (`_alone`): when no fault is left to happen, and all that one client has in flight cannot meet anything
   of the others', only its steps are explored; those of the others stay possible and lead to the same states. No
   invariant is hidden by it: the steps taken first do not write metadata, and store copies only where that cannot hide that
   the writer confirms an entry with too few (`_unseen`), so they can only make a violation show earlier. No run is
   infinite, so nobody is put off for ever.
5. *Names of bookies* do not matter when each has every entry. Ensembles are compared as sets then, so every choice that
   depends on the order of positions or names branches: which spare is chosen, which replica is asked for the base.
"""

from __future__ import annotations

import traceback
from typing import Any

from magnetar.ledger.core.metadata import LedgerMetadata, LedgerState
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryState
from magnetar.ledger.core.writer import WriterCore, WriterState

from .core_table import failure
from .forgetting import REPAIR, Forgetting
from .ledger_world import ABSENT, FENCED, LEDGER, UNAVAILABLE, WRITER, Shape, _end, lac_of
from .looks import LIVE, State
from .search import Broken

_BUSY = (WriterState.CHANGING, WriterState.DRAINING, WriterState.SEALING, WriterState.JUDGING)


class ReducedWorld(Forgetting):
    """A `Model`. Client 0 is the writer, the others recover."""

    def __init__(self, shape: Shape, *, partial_order: bool = True, core_checks: bool = True) -> None:
        super().__init__(shape, core_checks)
        self.partial_order = partial_order
        self._checked: dict[tuple[Any, ...], None] = {}
        self._busy: dict[int, bool] = {}

    def start(self) -> State:
        """See Model."""
        shape = self.shape
        striping = Striping(shape.ensemble_size, shape.write_quorum, shape.ack_quorum)
        metadata = LedgerMetadata.create(striping, shape.names[: shape.ensemble_size], 0, {})
        bookie = self._bookie(True, False, ())
        return (
            self._core(WriterCore(LEDGER, metadata, 0)),
            (-1,) * shape.recoverers,
            (bookie,) * shape.bookies,
            self._meta(metadata, 0),
            tuple(sorted(self._message(("l", REPAIR, name, False)) for name in shape.names[: shape.repairs])),
            shape.crashes,
            shape.losses,
            -1,
            False,
        )

    # --- what can happen ---------------------------------------------------------------------------------------------

    def following(self, state: State) -> list[tuple[Any, ...]]:
        """See Model."""
        out: list[tuple[Any, ...]] = []
        writer, recoverers, _bookies, meta, messages, crashes, losses, _, close_asked = state
        alone = self._alone(state) if self.partial_order and not crashes and not losses else -1
        lanes: dict[tuple[Any, ...], int] = {}
        things = self.messages.things
        if not self.shape.overtaking:
            for number in messages:
                message = things[number]
                if (message[0] == "a" and message[-1]) or (message[0] == "A" and not message[4]):
                    lane = message[:3]
                    if lane not in lanes or message[3] < things[lanes[lane]][3]:
                        lanes[lane] = number
        last = -1
        for number in messages:
            if number == last:
                continue
            last = number
            message = things[number]
            if alone >= 0 and message[1] != alone:
                continue
            if lanes and lanes.get(message[:3], number) != number:
                if (message[0] == "a" and message[-1]) or (message[0] == "A" and not message[4]):
                    continue
            self._message_steps(out, state, number, message)
        if alone <= 0:
            core = self.cores.things[writer]
            if core.refusal() is None and core.last_add_pushed + 1 < self.shape.entries:
                self._tell(out, ("append",), state, WRITER, ("append",))
            elif self.shape.writer_closes and not close_asked:
                self._tell(out, ("close",), (*state[:8], True), WRITER, ("close",))
        if alone < 0:
            for client, core in enumerate(recoverers, 1):
                if core < 0:
                    self._tell(out, ("begin", client), state, client, ("begin", meta))
                    break
        return out

    def _alone(self, state: State) -> int:
        """The client whose steps are enough, or -1. See 4 above."""
        writer, recoverers, bookies, meta, messages, *_, close_asked = state
        core = self.cores.things[writer]
        moves = (core.refusal() is None and core.last_add_pushed + 1 < self.shape.entries) or (
            self.shape.writer_closes and not close_asked
        )
        independent = True
        for number in messages:
            kind, client, *rest = self.messages.things[number]
            if client != WRITER:
                continue
            if kind == "m":
                # In these states it fails, or fails to seal, alike whether it finds the ledger in recovery or closed.
                doomed = self.metas.things[meta][0].state is not LedgerState.OPEN and rest[0] < 0
                if not doomed or core.state not in (WriterState.CHANGING, WriterState.FAILED):
                    independent = False
            elif kind == "a":
                alive, fenced, _ = self.bookies.things[bookies[self.names.index(rest[0])]]
                if alive and not fenced:
                    independent = False
            moves = True
        if independent and moves:
            return WRITER
        if len(recoverers) != 1 or recoverers[0] < 0:
            return -1
        moves = False
        for number in messages:
            kind, client, *rest = self.messages.things[number]
            if client == WRITER:
                continue
            if kind == "m":
                return -1
            if kind in "lra":
                alive, fenced, entries = self.bookies.things[bookies[self.names.index(rest[0])]]
                if kind == "a":
                    if alive and rest[1] not in dict(entries) and not self._unseen(state, rest[1]):
                        return -1
                elif alive and not fenced:
                    return -1
            moves = True
        return 1 if moves else -1

    def _unseen(self, state: State, entry_id: int) -> bool:
        """Whether one more copy cannot hide that the writer confirms an entry that has too few."""
        writer, _, bookies, meta, _, _, _, confirmed, _ = state
        core, metadata = self.cores.things[writer], self.metas.things[meta][0]
        if metadata.state is LedgerState.OPEN:
            return False
        if entry_id <= confirmed or core.error is not None or core.state not in LIVE:
            return True
        return len(self._copies(bookies, metadata, entry_id)) >= self.shape.ack_quorum

    def _message_steps(
        self, out: list[tuple[Any, ...]], state: State, number: int, message: tuple[Any, ...]
    ) -> None:
        writer, recoverers, bookies, meta, messages, crashes, losses, confirmed, close_asked = state
        kind, client, name = message[:3]
        where = messages.index(number)
        rest = messages[:where] + messages[where + 1 :]
        without = (writer, recoverers, bookies, meta, rest, crashes, losses, confirmed, close_asked)
        if kind == "m":
            self._metadata_steps(out, without, number, message)
            return
        if kind in "ALRM":
            self._tell(out, ("arrives", number), without, client, (kind, *message[2:]))
            if losses and not (kind == "A" and message[4] == UNAVAILABLE):
                lost = (*without[:6], losses - 1, confirmed, close_asked)
                told = ("M", "failed", 0) if kind == "M" else failure(message)
                self._tell(out, ("lost", number), lost, client, told, useless=True)
            return
        at = self.names.index(name)
        alive, fenced, entries = self.bookies.things[bookies[at]]
        wanted = message[-1]
        if not alive:
            self._tell(out, ("dead", number), without, client, failure(message))
            return
        answer, bookie = self._at_bookie(message, alive, fenced, entries)
        after = (
            writer,
            recoverers,
            (*bookies[:at], bookie, *bookies[at + 1 :]),
            *without[3:],
        )
        if not wanted:
            out.append((self._settled(after), "arrives", number))
            return
        if client == WRITER or self.shape.late_answers:
            answered = (*after[:4], self._with(rest, (self._message(answer),)), *after[5:])
            out.append((self._settled(answered), "arrives", number))
        else:
            self._tell(out, ("arrives", number), after, client, (answer[0], *answer[2:]))
        if crashes:
            gone = (*bookies[:at], self._bookie(False, fenced, entries), *bookies[at + 1 :])
            crashed = (writer, recoverers, gone, meta, rest, crashes - 1, losses, confirmed, close_asked)
            self._tell(out, ("dies", number), crashed, client, failure(message), useless=True)
        if losses:
            late = self._with(rest, (self._message((*message[:-1], False)),))
            given_up = (*without[:4], late, crashes, losses - 1, confirmed, close_asked)
            self._tell(out, ("given up", number), given_up, client, failure(message), useless=True)

    def _at_bookie(
        self, message: tuple[Any, ...], alive: bool, fenced: bool, entries: tuple[tuple[int, bytes], ...]
    ) -> tuple[tuple[Any, ...], int]:
        """What a living bookie does: its answer, and itself afterwards."""
        match message:
            case ("a", client, name, entry_id, entry, _):
                if fenced and client == WRITER:
                    return ("A", client, name, entry_id, FENCED), self._bookie(alive, fenced, entries)
                have = dict(entries)
                if have.setdefault(entry_id, entry) != entry:
                    raise Broken(
                        f"entry {entry_id} has two contents at bookie {name}",
                        ("arrives", self._message(message)),
                    )
                return ("A", client, name, entry_id, 0), self._bookie(
                    alive, fenced, tuple(sorted(have.items()))
                )
            case ("l", client, name, _):
                told = max((lac_of(entry) for _, entry in entries), default=-1)
                return ("L", client, name, told, 0), self._bookie(alive, True, entries)
            case ("r", client, name, entry_id, _):
                found = dict(entries).get(entry_id)
                code = 0 if found else ABSENT
                return ("R", client, name, entry_id, found or b"", code), self._bookie(alive, True, entries)
        raise AssertionError(message)

    def _metadata_steps(
        self, out: list[tuple[Any, ...]], state: State, number: int, message: tuple[Any, ...]
    ) -> None:
        writer, recoverers, bookies, meta, rest, crashes, losses, confirmed, close_asked = state
        _, client, proposed, version, wanted = message
        metadata, current = self.metas.things[meta]
        answer: tuple[Any, ...] = ("M", "found", meta)
        after = state
        if proposed >= 0 and version == current:
            if metadata.closed:
                raise Broken("a closed ledger was written again", ("arrives", number))
            after = (writer, recoverers, bookies, proposed, *state[4:])
            answer = ("M", "written", version + 1)
        if not wanted:
            out.append((self._settled(after), "arrives", number))
        elif client == WRITER or self.shape.late_answers:
            sent = self._message((answer[0], client, *answer[1:]))
            answered = (*after[:4], self._with(rest, (sent,)), *after[5:])
            out.append((self._settled(answered), "arrives", number))
        else:
            self._tell(out, ("arrives", number), after, client, answer)
        if losses and wanted:
            late = self._with(rest, (self._message((*message[:-1], False)),))
            given_up = (*state[:4], late, crashes, losses - 1, confirmed, close_asked)
            self._tell(out, ("given up", number), given_up, client, ("M", "failed", 0))

    @staticmethod
    def _with(messages: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(messages + more)) if more else messages

    def _tell(
        self,
        out: list[tuple[Any, ...]],
        action: tuple[Any, ...],
        state: State,
        client: int,
        stimulus: tuple[Any, ...],
        useless: bool = False,
    ) -> None:
        """Appends what becomes of `state` when a core is told something; `useless`: not what leaves the core as it was."""
        writer, recoverers, bookies, meta, messages, crashes, losses, confirmed, close_asked = state
        core = writer if client == WRITER else recoverers[client - 1]
        try:
            outcomes = self._step(client, core, stimulus)
            for following, sends, told, end in outcomes:
                if useless and following == core and not sends:
                    continue
                if client == WRITER:
                    writer = following
                else:
                    recoverers = (*recoverers[: client - 1], following, *recoverers[client:])
                known = confirmed
                for last in told:
                    assert last > known, "an entry was confirmed twice"
                    known = last
                if end is not None:
                    now = self.metas.things[meta][0]
                    assert now.closed, "somebody believes in an end that nobody wrote"
                    assert end == _end(now), "somebody believes in another end"
                result = self._settled(
                    (
                        writer,
                        recoverers,
                        bookies,
                        meta,
                        self._with(messages, sends),
                        crashes,
                        losses,
                        known,
                        close_asked,
                    )
                )
                out.append((result, *action))
        except Broken:
            raise
        except AssertionError as error:
            raise Broken(str(error) or _where(error), action) from error

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        """See Model; the invariants are those of `ledger_world`."""
        writer, recoverers, bookies, meta, messages, _, _, confirmed, _ = state
        key = (bookies, meta, confirmed)
        if key not in self._checked:
            self._check_entries(bookies, self.metas.things[meta][0], confirmed)
            self._checked[key] = None
        for client, number in enumerate((writer, *recoverers)):
            if number < 0:
                continue
            busy = self._busy.get(number)
            if busy is None:
                core = self.cores.things[number]
                if isinstance(core, WriterCore):
                    busy = bool(core.pending) or core.state in _BUSY
                else:
                    busy = core.state is not RecoveryState.DONE
                self._busy[number] = busy
            if busy and not any(self._awaited(message, client) for message in messages):
                state_name = self.cores.things[number].state
                raise AssertionError(f"client {client} hangs in {state_name}: no answer can come")

    def _awaited(self, number: int, client: int) -> bool:
        message = self.messages.things[number]
        return message[1] == client and (message[0] in "ALRM" or message[-1])

    def _check_entries(self, bookies: tuple[int, ...], metadata: LedgerMetadata, confirmed: int) -> None:
        if metadata.closed:
            assert metadata.last_entry >= confirmed, (
                f"truncated: closed at entry {metadata.last_entry}, entry {confirmed} was acknowledged"
            )
            assert metadata.length == metadata.last_entry + 1, "each entry has one byte of payload"
        for entry_id in range(max(confirmed, metadata.last_entry) + 1):
            copies = self._copies(bookies, metadata, entry_id)
            assert len(copies) >= self.shape.ack_quorum, (
                f"entry {entry_id} is stored by {len(copies)} bookies of its write set"
            )
            assert len(dict.fromkeys(copies)) == 1, f"the copies of entry {entry_id} differ"

    def _copies(self, bookies: tuple[int, ...], metadata: LedgerMetadata, entry_id: int) -> list[bytes]:
        """At the write set that the metadata say."""
        ensemble = metadata.ensemble_of(entry_id).bookies
        copies = []
        for position in metadata.striping.write_set(entry_id):
            entries = self.bookies.things[bookies[self.names.index(ensemble[position])]][2]
            copies += [entry for number, entry in entries if number == entry_id]
        return copies


def _where(error: AssertionError) -> str:
    """An assertion of a core without words: its line."""
    return traceback.extract_tb(error.__traceback__)[-1].line or repr(error)


__all__ = ["ReducedWorld"]
