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
   compare-and-set that comes too late is a read.
4. *Partial order* (`_alone`): when nothing that one client has in flight, or does by itself, can meet anything of the
   others', only its steps are explored; those of the others stay possible and lead to the same states. Budgets of faults
   do not spoil it: the client's first step of any path can be moved to the path's beginning, which spends no more in all,
   and a path without a step of the client loses nothing by one without a fault. (A crash does: it is everybody's. So while
   one is left, a request to a living bookie meets the others'.) No invariant is hidden by it: the steps taken first do not
   write metadata, and store copies only where that cannot hide that the writer confirms an entry with too few (`_unseen`),
   so they can only make a violation show earlier. No run is infinite, so nobody is put off for ever.
5. *Names* do not matter: those of bookies when each has every entry (ensembles are compared as sets then, so every choice
   that depends on the order of positions or names branches: which spare is chosen, which replica is asked for the base),
   those of recoverers never. How often a recovery started over does not matter either as long as it never gives up for that.
6. *With several recoverers* (`_powerless`), once the metadata are not OPEN any more, only what the others can notice of the
   writer counts: what its adds still store, and up to where it confirms. Its metadata writes come too late from then on.
   What makes it stop (a refusal, a loss, its own close) leaves everything as if it were merely slow, so it is not told;
   good answers come at once when it has nothing more to append: a higher confirmation breaks whatever a lower one does. What
   becomes of such a writer itself (does it hang, which end does it believe in) is explored in full with one recoverer.
"""

from __future__ import annotations

import traceback
from typing import Any

from magnetar.ledger.core.metadata import LedgerMetadata, LedgerState
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryState
from magnetar.ledger.core.writer import WriterCore, WriterState

from .core_table import failure
from .forgetting import NOBODY, Forgetting
from .invariants import broken, check_ledger, copies_of
from .keys import lac_of
from .ledger_world import ABSENT, FENCED, LEDGER, UNAVAILABLE, WRITER, _end
from .looks import LIVE, State
from .search import Broken
from .shape import Shape

_BUSY = (WriterState.CHANGING, WriterState.DRAINING, WriterState.SEALING, WriterState.JUDGING)


def _in_order(message: tuple[Any, ...]) -> bool:
    """Adds that are waited for, and their good answers: one connection carries them."""
    return bool((message[0] == "a" and message[-1]) or (message[0] == "A" and not message[4]))


class ReducedWorld(Forgetting):
    """A `Model`. Client 0 is the writer, the others recover."""

    def __init__(
        self,
        shape: Shape,
        *,
        partial_order: bool = True,
        core_checks: bool = True,
        whole_writer: bool = False,
    ) -> None:
        super().__init__(shape, core_checks, whole_writer)
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
            tuple(sorted(self._message(("l", NOBODY, name, False)) for name in shape.names[: shape.repairs])),
            shape.crashes,
            shape.losses,
            -1,
            False,
        )

    # --- what can happen ---------------------------------------------------------------------------------------------

    def following(self, state: State) -> list[tuple[Any, ...]]:
        """See Model."""
        out: list[tuple[Any, ...]] = []
        writer, recoverers, _bookies, meta, messages, _crashes, _losses, _, close_asked = state
        core = self.cores.things[writer]
        powerless = self._powerless_in(meta)
        deliverable = self._deliverable(messages)
        if powerless and core.state is WriterState.DRAINING:
            for number, message in deliverable:
                if message[:2] == ("A", WRITER):
                    self._message_steps(out, state, number, message)
                    return out
        alone = self._alone(state) if self.partial_order else -1
        for number, message in deliverable:
            if alone < 0 or (message[1] == alone and (message[0] in "ALRM" or message[-1])):
                self._message_steps(out, state, number, message)
        if alone <= 0:
            if self._appends(core):
                self._tell(out, ("append",), state, WRITER, ("append",))
            elif self.shape.writer_closes and not close_asked and not powerless:
                self._tell(out, ("close",), (*state[:8], True), WRITER, ("close",))
        if alone < 0:
            for client, number in enumerate(recoverers, 1):
                if number < 0:
                    self._tell(out, ("begin", client), state, client, ("begin", meta))
                    break
        return out

    def _deliverable(self, messages: tuple[int, ...]) -> list[tuple[int, tuple[Any, ...]]]:
        """Each that may arrive next, once."""
        things = self.messages.things
        lanes: dict[tuple[Any, ...], int] = {}
        if not self.shape.overtaking:
            for number in messages:
                message = things[number]
                if _in_order(message):
                    lane = message[:3]
                    if lane not in lanes or message[3] < things[lanes[lane]][3]:
                        lanes[lane] = number
        out = []
        last = -1
        for number in messages:
            if number != last:
                last = number
                message = things[number]
                if not _in_order(message) or lanes.get(message[:3], number) == number:
                    out.append((number, message))
        return out

    def _alone(self, state: State) -> int:
        """The client whose steps are enough, or -1. See 4 above."""
        writer, recoverers, _, _, messages, _, _, _, close_asked = state
        core = self.cores.things[writer]
        closes = self.shape.writer_closes and not close_asked and not self._powerless_in(state[3])
        moves = self._appends(core) or closes
        mail: list[list[tuple[Any, ...]]] = [[] for _ in range(len(recoverers) + 1)]
        for number in messages:
            message = self.messages.things[number]
            if message[1] != NOBODY and (message[0] in "ALRM" or message[-1]):
                mail[message[1]].append(message)
        if (moves or mail[WRITER]) and all(self._writers_own(state, core, m) for m in mail[WRITER]):
            return WRITER
        for client in range(1, len(recoverers) + 1):
            if mail[client] and all(self._recoverers_own(state, client, m) for m in mail[client]):
                return client
        return -1

    def _writers_own(self, state: State, core: WriterCore, message: tuple[Any, ...]) -> bool:
        """Whether what happens to its message is the same before and after all that others can do."""
        kind, _, name = message[:3]
        if kind == "m":
            # In these states it fails, or fails to seal, alike whether it finds the ledger in recovery or closed.
            doomed = self.metas.things[state[3]][0].state is not LedgerState.OPEN and name < 0
            return doomed and core.state in (WriterState.CHANGING, WriterState.FAILED)
        if kind != "a":
            return True
        alive, fenced, _ = self.bookies.things[state[2][self._at[name]]]
        return not alive or bool(fenced and not state[5])

    def _recoverers_own(self, state: State, client: int, message: tuple[Any, ...]) -> bool:
        """The same."""
        kind, _, name = message[:3]
        if kind == "m":
            return bool(self.metas.things[state[3]][0].closed)
        if kind in "ALRM":
            return True
        alive, fenced, entries = self.bookies.things[state[2][self._at[name]]]
        if not alive:
            return True
        if state[5] or not fenced:
            return False
        if kind != "l" and any(have == message[3] for have, _ in entries):
            return True
        for other, number in enumerate(state[1], 1):
            if other != client and (number < 0 or self.cores.things[number].state is not RecoveryState.DONE):
                return False
        if any(self.messages.things[number][:2] == ("a", NOBODY) for number in state[4]):
            return False
        return kind != "a" or self._unseen(state, message[3])

    def _unseen(self, state: State, entry_id: int) -> bool:
        """Whether one more copy cannot hide that the writer confirms an entry that has too few."""
        writer, _, bookies, meta, _, _, _, confirmed, _ = state
        core, metadata = self.cores.things[writer], self.metas.things[meta][0]
        if metadata.state is LedgerState.OPEN:
            return False
        if entry_id <= confirmed or core.error is not None or core.state not in LIVE:
            return True
        stored = {name: self.bookies.things[number][2] for name, number in zip(self.names, bookies)}
        return len(copies_of(stored, metadata, entry_id)) >= self.shape.ack_quorum

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
        faults = client != WRITER or not self._powerless_in(meta)
        if kind in "ALRM":
            self._tell(out, ("arrives", number), without, client, (kind, *message[2:]))
            if losses and faults and not (kind == "A" and message[4] == UNAVAILABLE):
                lost = (*without[:6], losses - 1, confirmed, close_asked)
                told = ("M", "failed", 0) if kind == "M" else failure(message)
                self._tell(out, ("lost", number), lost, client, told)
            return
        at = self._at[name]
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
        if crashes and faults:
            gone = (*bookies[:at], self._bookie(False, fenced, entries), *bookies[at + 1 :])
            crashed = (writer, recoverers, gone, meta, rest, crashes - 1, losses, confirmed, close_asked)
            self._tell(out, ("dies", number), crashed, client, failure(message))
        if losses and faults:
            late = self._with(rest, (self._message((*message[:-1], False)),))
            given_up = (*without[:4], late, crashes, losses - 1, confirmed, close_asked)
            self._tell(out, ("given up", number), given_up, client, failure(message))

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
                        broken("no divergence", f"entry {entry_id} has two contents at bookie {name}"),
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
                raise Broken(broken("final", "a closed ledger was written again"), ("arrives", number))
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
    ) -> None:
        """Appends what becomes of `state` when a core is told something."""
        writer, recoverers, bookies, meta, messages, crashes, losses, confirmed, close_asked = state
        core = writer if client == WRITER else recoverers[client - 1]
        try:
            outcomes = self._step(client, core, stimulus)
            for following, sends, told, end in outcomes:
                if client == WRITER:
                    writer = following
                else:
                    recoverers = (*recoverers[: client - 1], following, *recoverers[client:])
                known = confirmed
                for last in told:
                    assert last > known, broken("order", f"entry {last} is confirmed after entry {known}")
                    known = last
                if end is not None:
                    now = self.metas.things[meta][0]
                    assert now.closed, broken(
                        "one end", f"client {client} believes in an end that nobody wrote"
                    )
                    assert end == _end(now), broken(
                        "one end", f"client {client} believes in {end}, written was {_end(now)}"
                    )
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
            raise Broken(str(error) or broken("the cores' own", _where(error)), action) from error

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        """See Model."""
        writer, recoverers, bookies, meta, messages, _, _, confirmed, _ = state
        key = (bookies, meta, confirmed)
        if key not in self._checked:
            stored = [self.bookies.things[number][2] for number in bookies]
            check_ledger(stored, self.names, self.metas.things[meta][0], confirmed)
            self._checked[key] = None
        for client, number in enumerate((writer, *recoverers)):
            if number < 0 or (client == WRITER and self._powerless_in(meta)):
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
                raise AssertionError(
                    broken("nobody hangs", f"client {client} waits in {state_name}, and no answer can come")
                )

    def _awaited(self, number: int, client: int) -> bool:
        message = self.messages.things[number]
        return message[1] == client and (message[0] in "ALRM" or message[-1])


def _where(error: AssertionError) -> str:
    """An assertion of a core without words: its line."""
    return traceback.extract_tb(error.__traceback__)[-1].line or repr(error)


__all__ = ["ReducedWorld"]
