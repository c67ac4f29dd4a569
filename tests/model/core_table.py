"""The cores as tables: what each does with each event, found out once, and numbers for what comes up."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Iterator
from itertools import permutations
from typing import Any

from magnetar.ledger.core import events as ev
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryCore, RecoveryState
from magnetar.proto.errors import StorageFailed
from magnetar.proto.ledger_entry import decode_ledger_entry_header

from .clones import clone
from .ledger_world import LEDGER, UNAVAILABLE, WRITER, _end
from .shape import Shape


class Numbers:
    """Things by number, numbers by what tells things apart."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def of(self, key: Hashable, thing: Any) -> int:
        """The thing's; the same for equal keys."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.things)
            self.things.append(thing)
        return number


def frozen(value: Any) -> Any:
    """A hashable picture of a core: every field."""
    if value is None or isinstance(value, (int, str, bytes)):
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return tuple(sorted((key, frozen(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple, deque)):
        return tuple([frozen(item) for item in value])
    if isinstance(value, BaseException):
        return type(value).__name__
    if isinstance(value, Striping):
        return ()  # one for all
    if isinstance(value, LedgerMetadata):
        return (value.state, frozen(value.ensembles), value.last_entry, value.length)
    names = getattr(type(value), "__slots__", None) or sorted(value.__dict__)
    return tuple([frozen(getattr(value, name)) for name in names])


class CoreTable:
    """What a core becomes, sends and tells."""

    def __init__(self, shape: Shape, core_checks: bool) -> None:
        self.shape = shape
        self.names = shape.names
        self.core_checks = (
            core_checks  # False: what the protocol promises must show a defect, not a core's `check`
        )
        self.cores = Numbers()
        self.metas = Numbers()  # (metadata, version)
        self.bookies = Numbers()  # (alive, fenced, ((entry id, entry), ...))
        self.messages = Numbers()
        self._steps: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def _core(self, core: Any) -> int:
        if self.core_checks:
            core.check()
        return self.cores.of((type(core), frozen(core)), core)

    def _meta(self, metadata: LedgerMetadata, version: int) -> int:
        return self.metas.of((frozen(metadata), version), (metadata, version))

    def _bookie(self, alive: bool, fenced: bool, entries: tuple[tuple[int, bytes], ...]) -> int:
        return self.bookies.of((alive, fenced, entries), (alive, fenced, entries))

    def _message(self, message: tuple[Any, ...]) -> int:
        return self.messages.of(message, message)

    def _step(self, client: int, core: int, stimulus: tuple[Any, ...]) -> tuple[Any, ...]:
        """(core afterwards, messages sent, entries confirmed up to, end believed in) of each way this can go."""
        key = (client, core, stimulus)
        outcomes = self._steps.get(key)
        if outcomes is None:
            if stimulus[0] == "begin":
                mine: Any = RecoveryCore(LEDGER, *self.metas.things[stimulus[1]])
                before = None
            else:
                mine = clone(self.cores.things[core])
                before = mine.state
            sends: list[int] = []
            told: list[int] = []
            instructions = self._handle(client, mine, stimulus, sends, told)
            outcomes = self._steps[key] = tuple(
                (self._core(one), tuple(sent), tuple(confirmed), end)
                for one, sent, confirmed, end in self._ways(client, mine, before, instructions, sends, told)
            )
        return outcomes

    def _handle(
        self, client: int, core: Any, stimulus: tuple[Any, ...], sends: list[int], told: list[int]
    ) -> list[ev.Instruction]:
        match stimulus:
            case ("append",):
                entry, bookies = core.append(b"x", None)
                sends += [
                    self._message(("a", client, name, core.last_add_pushed, entry, True)) for name in bookies
                ]
                return []
            case ("close",):
                event: ev.Event = ev.CloseRequested()
            case ("begin", _):
                return core.begin()  # type: ignore[no-any-return]
            case ("A", name, entry_id, 0) if client == WRITER:
                if core.stored(name, entry_id):
                    told.append(core.last_add_confirmed)
                    return core.drained()  # type: ignore[no-any-return]
                return []
            case ("A", name, entry_id, code):
                event = ev.AddFailed(name, entry_id, code) if code else ev.AddStored(name, entry_id)
            case ("L", name, last_add_confirmed, code):
                event = ev.LastConfirmedRead(name, last_add_confirmed, code)
            case ("R", name, entry_id, entry, code):
                length = decode_ledger_entry_header(entry).length if entry else 0
                event = ev.EntriesRead(name, [ev.EntryRead(entry_id, entry, length, code)])
            case ("M", "written", version):
                event = ev.MetadataWritten(version)
            case ("M", "found", meta):
                event = ev.MetadataFound(*self.metas.things[meta])
            case ("M", "failed", _):
                event = ev.MetadataFailed(StorageFailed("the metadata store does not answer"))
            case _:
                raise AssertionError(stimulus)
        return core.handle(event)  # type: ignore[no-any-return]

    def _ways(
        self,
        client: int,
        core: Any,
        before: Any,
        instructions: list[ev.Instruction],
        sends: list[int],
        told: list[int],
    ) -> Iterator[tuple[Any, list[int], list[int], tuple[int, int] | None]]:
        """Carries instructions out; where something is chosen, once for each choice."""
        end = None
        queue = deque(instructions)
        while queue:
            match queue.popleft():
                case ev.SendAdds(name, adds):
                    sends += [
                        self._message(("a", client, name, number, entry, True)) for number, entry in adds
                    ]
                case ev.Confirm(first, adds, None):
                    told.append(first + len(adds) - 1)
                case ev.Confirm() | ev.Failed():
                    pass
                case ev.ChooseBookies(positions, exclude):
                    left = [name for name in self.names if name not in exclude]
                    if len(left) < len(positions):
                        queue.extend(core.handle(ev.NoBookies("none is left")))
                        continue
                    for chosen in permutations(left, len(positions)):
                        other = clone(core)
                        more = other.handle(ev.BookiesChosen(dict(zip(positions, chosen))))
                        yield from self._ways(client, other, other.state, [*queue, *more], [*sends], [*told])
                    return
                case ev.WriteMetadata(metadata, version):
                    sends.append(
                        self._message(("m", client, self._meta(metadata, version + 1), version, True))
                    )
                case ev.ReadMetadata():
                    sends.append(self._message(("m", client, -1, 0, True)))
                case ev.ReadLastConfirmed(name):
                    sends.append(self._message(("l", client, name, True)))
                case ev.ReadEntries(name, begin, last, stripe):
                    if self.shape.symmetric and core.state is RecoveryState.BASE is not before:
                        for first, *others in permutations([name, *core._base_replicas]):
                            other = clone(core)
                            other._base_replicas = others
                            asked = self._message(("r", client, first, begin, True))
                            yield other, [*sends, asked], told, end
                        return
                    sends += [
                        self._message(("r", client, name, number, True)) for number in stripe.ids(begin, last)
                    ]
                case ev.Finished(metadata):
                    end = _end(metadata)
                case instruction:
                    raise AssertionError(instruction)
        yield core, sends, told, end


def failure(message: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the sender is told when it gets no answer."""
    kind, name = message[0].upper(), message[2]
    if kind == "A":
        return ("A", name, message[3], UNAVAILABLE)
    if kind == "L":
        return ("L", name, -1, UNAVAILABLE)
    return ("R", name, message[3], b"", UNAVAILABLE)
