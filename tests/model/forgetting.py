"""What can make no difference any more (reduction 3 of `reduced_world`) is taken out of states."""

from __future__ import annotations

from typing import Any

from magnetar.ledger.core.metadata import LedgerState
from magnetar.ledger.core.recovery import RecoveryCore, RecoveryState
from magnetar.ledger.core.writer import WriterCore, WriterState

from .core_table import failure
from .ledger_world import FENCED, UNAVAILABLE, WRITER, Shape
from .looks import LIVE, Looks, State

# The client of a fence that nobody asked for.
REPAIR = -1


class Forgetting(Looks):
    """States without what is over."""

    def __init__(self, shape: Shape, core_checks: bool) -> None:
        super().__init__(shape, core_checks)
        self._fates: dict[tuple[int, int, int, int], int] = {}

    def _settled(self, state: State) -> State:
        """Without what can make no difference any more (3 above)."""
        writer, recoverers, bookies, meta, messages, *rest = state
        things = self.messages.things
        fates = self._fates
        core = self.cores.things[writer]
        kept: list[int] = []
        others: list[int] = []
        reached: dict[str, None] = {}  # bookies that the writer's adds can still come to
        for number in messages:
            message = things[number]
            if message[1] != WRITER:
                others.append(number)
                continue
            bookie = bookies[self.names.index(message[2])] if message[0] in "aA" else -1
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
            recoverer = recoverers[message[1] - 1] if message[1] != REPAIR else -1
            bookie = bookies[self.names.index(message[2])] if message[0] in "alrALR" else -1
            key = (number, recoverer, bookie, meta)
            fate = fates.get(key)
            if fate is None:
                fate = fates[key] = self._recoverers_fate(message, recoverer, bookie, meta)
            if fate >= 0:
                kept.append(fate)
        kept.sort()
        return (writer, recoverers, bookies, meta, tuple(kept), *rest)

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
        appends = core.refusal() is None and core.last_add_pushed + 1 < self.shape.entries
        return tuple(core._bits) if appends else ()

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
        if client == REPAIR:
            alive, fenced, _ = self.bookies.things[bookie]
            return self._message(message) if alive and not fenced else -1
        core: RecoveryCore = self.cores.things[number]
        done = core.state is RecoveryState.DONE
        if kind == "m":
            if done:
                message = (*message[:-1], False)
            stale = name < 0 or message[3] < self.metas.things[meta][1]
            return -1 if stale and not message[-1] else self._message(message)
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
        alive, fenced, entries = self.bookies.things[bookie]
        if wanted:
            return self._message(message)
        if not alive or (fenced and kind in "lr"):
            return -1
        if kind == "a" and (self.shape.recoverers == 1 or any(have == entry_id for have, _ in entries)):
            return -1
        return self._message((*message[:-1], False))

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
                return position not in core._failing and position not in core._gone

    def _ignores(self, client: int, core: Any, stimulus: tuple[Any, ...]) -> None:
        number = self._core(core)
        look = self._core_key(0, number)
        for following, sends, told, end in self._step(client, number, stimulus):
            same = self._core_key(0, following) == look and not sends and not told and end is None
            assert same, f"an answer that should change nothing does: {stimulus}"
