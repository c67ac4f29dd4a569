"""What can make no difference any more (reduction 3 of `reduced_world`) is taken out of states."""

from __future__ import annotations

from typing import Any

from magnetar.ledger.core.metadata import LedgerState
from magnetar.ledger.core.recovery import RecoveryCore, RecoveryState
from magnetar.ledger.core.writer import WriterCore, WriterState

from .core_table import failure
from .ledger_world import FENCED, LEDGER, UNAVAILABLE, WRITER
from .looks import LIVE, Looks, State
from .shape import Shape

# The client of requests that nobody waits for: fences of a repair, what recoverers have given up. Only what they do counts.
NOBODY = -1
_CONFIRMING = (WriterState.WRITING, WriterState.DRAINING)


class Forgetting(Looks):
    """States without what is over."""

    def __init__(self, shape: Shape, core_checks: bool, whole_writer: bool) -> None:
        super().__init__(shape, core_checks)
        self.whole_writer = whole_writer or shape.recoverers < 2
        self._fates: dict[tuple[int, int, int, int], int] = {}
        self._silent = -1
        self._at = {name: position for position, name in enumerate(self.names)}

    def _settled(self, state: State) -> State:
        """Without what can make no difference any more (3 above)."""
        writer, recoverers, bookies, meta, messages, *rest = state
        things = self.messages.things
        fates = self._fates
        if self._powerless_in(meta):
            writer, messages, rest[-1] = self._powerless(writer, bookies, meta, messages, rest[-1])
        core = self.cores.things[writer]
        kept: list[int] = []
        others: list[int] = []
        reached: dict[str, None] = {}  # bookies that the writer's adds can still come to
        for number in messages:
            message = things[number]
            if message[1] != WRITER:
                others.append(number)
                continue
            bookie = bookies[self._at[message[2]]] if message[0] in "aA" else -1
            key = (number, writer, bookie, meta)
            fate = fates.get(key)
            if fate is None:
                fate = fates[key] = self._writers_fate(message, core, bookie, meta)
            if fate >= 0:
                kept.append(fate)
                if message[0] == "a":
                    reached[message[2]] = None
        future = self._future(core, meta, messages)
        bookies = tuple(
            bookie
            if self.bookies.things[bookie][1] or name in reached or name in future
            else self._bookie(self.bookies.things[bookie][0], True, self.bookies.things[bookie][2])
            for name, bookie in zip(self.names, bookies)
        )
        for number in others:
            message = things[number]
            recoverer = recoverers[message[1] - 1] if message[1] != NOBODY else -1
            bookie = bookies[self._at[message[2]]] if message[0] in "alrALR" else -1
            key = (number, recoverer, bookie, meta)
            fate = fates.get(key)
            if fate is None:
                fate = fates[key] = self._recoverers_fate(message, recoverer, bookie, meta)
            if fate >= 0 and (things[fate][1] != NOBODY or fate not in kept):
                kept.append(fate)
        kept.sort()
        return (writer, recoverers, bookies, meta, tuple(kept), *rest)

    def _powerless_in(self, meta: int) -> bool:
        """Whether only what others can notice of the writer counts (6 above)."""
        return not self.whole_writer and self.metas.things[meta][0].state is not LedgerState.OPEN

    def _powerless(
        self, writer: int, bookies: tuple[int, ...], meta: int, messages: tuple[int, ...], close_asked: bool
    ) -> tuple[int, tuple[int, ...], bool]:
        """What others can notice of a writer whose ledger is no longer OPEN (6 above): it, the messages, close_asked."""
        things = self.messages.things
        core = self.cores.things[writer]
        changed = any(things[number][:3] == ("M", WRITER, "written") for number in messages)
        lives = core.error is None and (
            core.state in _CONFIRMING or (core.state is WriterState.CHANGING and changed)
        )
        if lives and core.state in _CONFIRMING and not self._appends(core):
            lives = bool(core.pending)
            if lives and core.state is WriterState.WRITING:
                ((writer, _, _, _),) = self._step(WRITER, writer, ("close",))
            close_asked = True
        kept: list[int] = []
        mine: list[int] = []  # adds that can be stored, good answers
        for number in messages:
            message = things[number]
            if message[1] != WRITER:
                kept.append(number)
            elif message[0] == "a":
                alive, fenced, _ = self.bookies.things[bookies[self._at[message[2]]]]
                if alive and not fenced:
                    mine.append(number)
            elif message[0] == "m":
                if self._still_does(message, -1, meta):
                    kept.append(self._message((*message[:-1], False)))
            elif message[2] == "written" if message[0] == "M" else message[4] == 0:
                mine.append(number)
        if lives and (core.state is WriterState.CHANGING or not close_asked or self._confirms(core, mine)):
            return writer, (*kept, *mine), close_asked
        kept += [self._message((*things[n][:-1], False)) for n in mine if things[n][0] == "a"]
        return self._silent_writer(), tuple(kept), True

    def _confirms(self, core: WriterCore, mine: list[int]) -> bool:
        """Whether its next entry can still have Qa answers."""
        entry_id, acked = core.last_add_confirmed + 1, core.pending[0].acked
        for number in mine:
            kind, _, name, number_of_entry, *rest = self.messages.things[number]
            if kind in "aA" and number_of_entry == entry_id and (kind == "A" or rest[-1]):
                acked |= core._bits.get(name, 0) & core._masks[entry_id % core._size]
        return acked.bit_count() >= self.shape.ack_quorum

    def _appends(self, core: WriterCore) -> bool:
        """Whether there is more to append."""
        return core.refusal() is None and core.last_add_pushed + 1 < self.shape.entries

    def _silent_writer(self) -> int:
        """One for all that do nothing any more."""
        if self._silent >= 0:
            return self._silent
        core = WriterCore(LEDGER, self.metas.things[0][0], 0)
        core.state, core.sending, core.close_requested = WriterState.CLOSED, False, True
        self._silent = self._core(core)
        return self._silent

    def _future(self, core: WriterCore, meta: int, messages: tuple[int, ...]) -> tuple[str, ...]:
        """Bookies that the writer may yet send adds to."""
        if core.error is not None or core.state not in LIVE:
            return ()
        if self.metas.things[meta][0].state is LedgerState.OPEN:
            return self.names
        # No ensemble change of its own comes through any more, unless it did already and the answer is on its way.
        if core.state is WriterState.CHANGING:
            answered = any(self.messages.things[number][:2] == ("M", WRITER) for number in messages)
            return (*core._bits, *(core._changing_to or ())) if answered else ()
        return tuple(core._bits) if self._appends(core) else ()

    def _writers_fate(self, message: tuple[Any, ...], core: WriterCore, bookie: int, meta: int) -> int:
        """The number of what remains of it; -1: nothing."""
        kind, _, name, entry_id = message[:4]
        metadata, version = self.metas.things[meta]
        if kind == "m":
            if name < 0 or message[3] < version:  # too late: no more than a question what is there
                return self._message(("m", WRITER, -1, 0, True)) if message[-1] else -1
            return self._message(message)
        if kind == "M":
            return self._message(message)
        live = core.error is None and core.state in LIVE
        member = name in core._bits
        alive, fenced, entries = self.bookies.things[bookie]
        if kind == "A":
            code = message[4]
            if not live or (code == 0 and (entry_id <= core.last_add_confirmed or not member)):
                self._ignores(WRITER, core, ("A", name, entry_id, code))
                return -1
            return self._message(message)
        wanted = message[-1]
        if wanted and not live:
            for code in (0, FENCED, UNAVAILABLE):
                self._ignores(WRITER, core, ("A", name, entry_id, code))
            wanted = False
        named = any(name in ensemble.bookies for ensemble in metadata.ensembles)
        if not (named or member or name in (core._changing_to or ())):
            return -1
        if not alive and (not wanted or not member or core._bits[name].bit_length() - 1 in core._failing):
            return -1
        if not wanted and (fenced or any(number == entry_id for number, _ in entries)):
            return -1
        return self._message((*message[:-1], wanted))

    def _recoverers_fate(self, message: tuple[Any, ...], number: int, bookie: int, meta: int) -> int:
        kind, client, name = message[:3]
        if client == NOBODY:
            return self._message(message) if self._still_does(message, bookie, meta) else -1
        core: RecoveryCore = self.cores.things[number]
        done = core.state is RecoveryState.DONE
        if kind == "m":
            if not done and message[-1]:
                return self._message(message)
            message = ("m", NOBODY, *message[2:-1], False)
            return self._message(message) if self._still_does(message, bookie, meta) else -1
        if kind == "M":
            return -1 if done else self._message(message)
        entry_id = message[3] if kind in "arAR" else -1
        awaited = not done and self._awaits(core, kind, name, entry_id)
        if kind in "ALR":
            if not awaited:
                self._ignores(client, core, (kind, *message[2:]))
            return self._message(message) if awaited else -1
        wanted = message[-1] and awaited
        if message[-1] and not awaited:
            self._ignores(client, core, failure(message))
        if wanted:
            return self._message(message)
        # A read that nobody waits for is a fence; whose re-add it was makes no difference.
        message = ("l", NOBODY, name, False) if kind in "lr" else (kind, NOBODY, *message[2:-1], False)
        return self._message(message) if self._still_does(message, bookie, meta) else -1

    def _still_does(self, message: tuple[Any, ...], bookie: int, meta: int) -> bool:
        """Whether a request that nobody waits for would change anything."""
        if message[0] == "m":
            return bool(message[2] >= 0 and message[3] >= self.metas.things[meta][1])
        alive, fenced, entries = self.bookies.things[bookie]
        if message[0] == "l":
            return bool(alive and not fenced)
        known = self.shape.recoverers == 1 or any(have == message[3] for have, _ in entries)
        return bool(alive and not known)

    @staticmethod
    def _awaits(core: RecoveryCore, kind: str, name: str, entry_id: int) -> bool:
        """Whether the answer, good or bad, can make a difference."""
        match kind.lower():
            case "l":
                return core.state is RecoveryState.FENCING
            case "r" if core.state is RecoveryState.BASE:
                return entry_id == core._base
            case "r":
                found = core._entries.get(entry_id)
                reading = core.state is RecoveryState.ENTRIES and entry_id >= core._next_add
                return reading and found is not None and name not in found.answered
            case _:
                bookies = core._changed.last_ensemble.bookies
                if core.state is not RecoveryState.ENTRIES or name not in bookies:
                    return False
                position = bookies.index(name)
                return position not in core._failing and position not in core._unreplaceable

    def _ignores(self, client: int, core: Any, stimulus: tuple[Any, ...]) -> None:
        number = self._core(core)
        look = self._core_key(0, number)
        for following, sends, told, end in self._step(client, number, stimulus):
            same = self._core_key(0, following) == look and not sends and not told and end is None
            assert same, f"an answer that should change nothing does: {stimulus}"
