"""One ledger, its bookies, a writer and recoverers: the real cores, exchanging messages that are lost, late and reordered.

A message in flight can arrive at any time, in any order, or never. So the writer need not be killed: one to whom nothing
is delivered is as good as dead. A *loss* (there is a budget of them) makes the sender believe that its request failed while
the request itself is still on its way: it may arrive much later, or never, and its answer is not heard. A *crash* (a budget,
too) fails all that is asked of a bookie from then on; its data stays. Metadata is one register with compare-and-set.

What must hold in every state (CORRECTNESS.md, "Invariants"):

* Nothing acknowledged is truncated: a closed ledger ends at or past every entry confirmed to the application.
* Nothing acknowledged is lost: a confirmed entry is stored by Qa bookies of its write set in the metadata of the store.
* A closed ledger is whole: each of its entries is stored so.
* No divergence: all copies of an entry are equal, all who learn of a closed ledger learn the same end.
* Nobody hangs: with nothing in flight every client is done, has failed, or has nothing outstanding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from itertools import groupby, permutations, product
from typing import Any

from magnetar.ledger.core import events as ev
from magnetar.ledger.core.events import PendingAdd
from magnetar.ledger.core.metadata import LedgerMetadata, LedgerState
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryCore, RecoveryState
from magnetar.ledger.core.writer import WriterCore, WriterState
from magnetar.proto.errors import (
    BookieUnavailable,
    EntryNotFound,
    LedgerFenced,
    MagnetarError,
    StorageFailed,
)
from magnetar.proto.ledger_entry import decode_ledger_entry_header

from .clones import clone
from .keys import lac_of, message_key, metadata_key, recovery_key, writer_key
from .shape import Shape

UNAVAILABLE = BookieUnavailable.code
ABSENT = EntryNotFound.code
FENCED = LedgerFenced.code
WRITER = 0
LEDGER = 1
# Requests end with whether the sender still waits. a: add, l: fence and read the LAC, r: fence and read an entry,
# m: metadata (None: read); answers have the capital letter.
REQUESTS = "alrm"
Message = tuple[Any, ...]


class Bookie:
    """What a bookie keeps of the ledger, all of it durable."""

    __slots__ = ("alive", "entries", "fenced")

    def __init__(self, alive: bool, fenced: bool, entries: dict[int, bytes]) -> None:
        self.alive = alive
        self.fenced = fenced
        self.entries = entries

    def copy(self) -> Bookie:
        """Independent."""
        return Bookie(self.alive, self.fenced, self.entries.copy())

    @property
    def last_add_confirmed(self) -> int:
        """Highest one that an entry told."""
        return max((lac_of(entry) for entry in self.entries.values()), default=-1)


class LedgerWorld:
    """A `World`. Client 0 is the writer, the others recover."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        striping = Striping(shape.ensemble_size, shape.write_quorum, shape.ack_quorum)
        self.metadata = LedgerMetadata.create(striping, shape.names[: shape.ensemble_size], 0, {})
        self.version = 0
        self.bookies = {name: Bookie(True, False, {}) for name in shape.names}
        self.writer = WriterCore(LEDGER, self.metadata, 0)
        self.recoverers: list[RecoveryCore | None] = [None] * shape.recoverers
        self.messages: list[Message] = []
        self.crashes = shape.crashes
        self.losses = shape.losses
        self.confirmed = -1  # last entry that the application was told to be stored
        self.close_asked = False
        # Clients whose core belongs to this world alone; the others are shared with the worlds it came from.
        self._own: dict[int, None] = {WRITER: None}
        # Keys of cores by client and order of bookies: most actions touch one client only.
        self._keys: dict[int, dict[tuple[str, ...], tuple[Any, ...]]] = {}

    def copy(self) -> LedgerWorld:
        """See World."""
        other = object.__new__(LedgerWorld)
        other.__dict__.update(self.__dict__)
        other.bookies = {name: bookie.copy() for name, bookie in self.bookies.items()}
        other.recoverers = self.recoverers.copy()
        other.messages = self.messages.copy()
        other._own = {}
        other._keys = self._keys.copy()
        return other

    # --- what can happen ---------------------------------------------------------------------------------------------

    def actions(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        """See World."""
        seen: dict[Message, None] = {}
        for message in self.messages:
            identity = _identity(message)
            if identity in seen:
                continue
            seen[identity] = None
            if not self.shape.overtaking and _in_order(message):
                lane = (message[0], *message[1:3])
                if lane in seen:
                    continue
                seen[lane] = None
            yield f"arrives: {_text(message)}", ("deliver", message)
            if self.losses and message[0] in REQUESTS and message[-1]:
                yield f"given up, still on its way: {_text(message)}", ("give up", message)
        writer = self.writer
        if writer.refusal() is None and writer.last_add_pushed + 1 < self.shape.entries:
            yield "the writer appends", ("append",)
        elif self.shape.writer_closes and not self.close_asked:
            yield "the writer closes", ("close",)
        for number, core in enumerate(self.recoverers):
            if core is None:
                yield f"recoverer {number + 1} begins", ("recover", number)
                break  # they are alike
        if self.crashes:
            # Only when somebody waits for it: before that, nobody could tell.
            for name in dict.fromkeys(m[2] for m in self.messages if m[0] in "alr" and m[-1]):
                yield f"bookie {name} dies", ("die", name)

    def apply(self, action: tuple[Any, ...]) -> None:
        """See World."""
        match action:
            case ("deliver", message):
                self.messages.remove(message)
                self._deliver(message)
            case ("give up", message):
                self.losses -= 1
                self.messages.remove(message)
                self.messages.append((*message[:-1], False))
                self._answer_failed(message)
            case ("append",):
                writer = self._writer()
                entry, bookies = writer.append(b"x", None)
                for bookie in bookies:
                    self._add(WRITER, bookie, writer.last_add_pushed, entry)
            case ("close",):
                self.close_asked = True
                self._carry_out(WRITER, self._writer().handle(ev.CloseRequested()))
            case ("recover", number):
                core = self.recoverers[number] = RecoveryCore(LEDGER, self.metadata, self.version)
                self._own[number + 1] = None
                self._keys.pop(number + 1, None)
                self._carry_out(number + 1, core.begin())
            case ("die", name):
                self.crashes -= 1
                self.bookies[name].alive = False
                for message in [m for m in self.messages if m[0] in "alr" and m[2] == name]:
                    self.messages.remove(message)
                    self._answer_failed(message)
            case _:
                raise AssertionError(action)
        self._forget_what_changes_nothing()

    # --- messages ----------------------------------------------------------------------------------------------------

    def _add(self, client: int, bookie: str, entry_id: int, entry: bytes) -> None:
        self._send(("a", client, bookie, entry_id, entry, True))

    def _send(self, request: Message) -> None:
        self.messages.append(request)
        if request[0] != "m" and not self.bookies[request[2]].alive:
            self.messages.pop()
            self._answer_failed(request)

    def _answer_failed(self, request: Message) -> None:
        """What the sender is told; nothing if it was told already."""
        match request:
            case ("a", client, bookie, entry_id, _, True):
                self._answer(("A", client, bookie, entry_id, UNAVAILABLE))
            case ("l", client, bookie, True):
                self._answer(("L", client, bookie, -1, UNAVAILABLE))
            case ("r", client, bookie, entry_id, True):
                self._answer(("R", client, bookie, entry_id, b"", UNAVAILABLE))
            case ("m", client, _, _, True):
                self._answer(("M", client, None, 0))

    def _answer(self, answer: Message) -> None:
        client = answer[1]
        if not self._listens(client, answer[0]):
            return
        if client == WRITER or answer[0] == "M" or self.shape.late_answers:
            self.messages.append(answer)
        else:
            self._tell(answer)

    def _listens(self, client: int, kind: str) -> bool:
        """Whether an answer can still make a difference to its receiver."""
        if client != WRITER:
            core = self.recoverers[client - 1]
            return core is not None and core.state is not RecoveryState.DONE
        if self.writer.state is WriterState.CLOSED:
            return False
        return kind in "mM" or self.writer.error is None

    def _forget_what_changes_nothing(self) -> None:
        """Answers nobody listens to, and requests nobody waits for that would find their work done: fewer states."""
        kept: list[Message] = []
        for message in self.messages:
            if message[0] not in REQUESTS:
                if self._listens(message[1], message[0]):
                    kept.append(message)
                continue
            if message[-1] and not self._listens(message[1], message[0]):
                message = (*message[:-1], False)
            if message[-1] or not self._is_idle(message):
                kept.append(message)
        self.messages = kept

    def _is_idle(self, request: Message) -> bool:
        if request[0] == "m":
            return request[2] is None or request[3] < self.version
        bookie = self.bookies[request[2]]
        if not bookie.alive:
            return True
        if request[0] == "a":
            return request[3] in bookie.entries or (bookie.fenced and request[1] == WRITER)
        return bookie.fenced

    def _deliver(self, message: Message) -> None:
        match message:
            case ("a", client, name, entry_id, entry, wanted):
                bookie = self.bookies[name]
                refused = bookie.fenced and client == WRITER
                if not refused:
                    old = bookie.entries.get(entry_id, entry)
                    assert old == entry, f"entry {entry_id} has two contents at bookie {name}"
                    bookie.entries[entry_id] = entry
                if wanted:
                    self._answer(("A", client, name, entry_id, FENCED if refused else 0))
            case ("l", client, name, wanted):
                bookie = self.bookies[name]
                bookie.fenced = True
                if wanted:
                    self._answer(("L", client, name, bookie.last_add_confirmed, 0))
            case ("r", client, name, entry_id, wanted):
                bookie = self.bookies[name]
                bookie.fenced = True
                found = bookie.entries.get(entry_id)
                if wanted:
                    self._answer(("R", client, name, entry_id, found or b"", 0 if found else ABSENT))
            case ("m", client, metadata, version, wanted):
                self._compare_and_set(client, metadata, version, wanted)
            case _:
                self._tell(message)

    def _compare_and_set(
        self, client: int, metadata: LedgerMetadata | None, version: int, wanted: bool
    ) -> None:
        if metadata is not None and version == self.version:
            assert not self.metadata.closed, "a closed ledger was written again"
            self.metadata, self.version = metadata, version + 1
            if wanted:
                self._answer(("M", client, "written", self.version))
        elif wanted:
            self._answer(("M", client, self.metadata, self.version))

    def _tell(self, answer: Message) -> None:
        client = answer[1]
        core = self._core(client)
        match answer:
            case ("A", 0, name, entry_id, 0):
                writer = self._writer()
                if writer.stored(name, entry_id):
                    self._confirm(writer.last_add_confirmed)
                    self._carry_out(WRITER, writer.drained())
                return
            case ("A", _, name, entry_id, code):
                event: ev.Event = ev.AddFailed(name, entry_id, code) if code else ev.AddStored(name, entry_id)
            case ("L", _, name, last_add_confirmed, code):
                event = ev.LastConfirmedRead(name, last_add_confirmed, code)
            case ("R", _, name, entry_id, entry, code):
                length = decode_ledger_entry_header(entry).length if entry else 0
                event = ev.EntriesRead(name, [ev.EntryRead(entry_id, entry, length, code)])
            case ("M", _, None, _):
                event = ev.MetadataFailed(StorageFailed("the metadata store does not answer"))
            case ("M", _, "written", version):
                event = ev.MetadataWritten(version)
            case ("M", _, metadata, version):
                event = ev.MetadataFound(metadata, version)
            case _:
                raise AssertionError(answer)
        self._carry_out(client, core.handle(event))

    def _core(self, client: int) -> WriterCore | RecoveryCore:
        """To be changed: a copy of its own, made once."""
        core = self.writer if client == WRITER else self.recoverers[client - 1]
        assert core is not None
        self._keys.pop(client, None)
        if client not in self._own:
            self._own[client] = None
            core = clone(core)
            if isinstance(core, WriterCore):
                self.writer = core
            else:
                self.recoverers[client - 1] = core
        return core

    def _writer(self) -> WriterCore:
        core = self._core(WRITER)
        assert isinstance(core, WriterCore)
        return core

    def _carry_out(self, client: int, instructions: list[ev.Instruction]) -> None:
        queue = deque(instructions)
        while queue:
            match queue.popleft():
                case ev.SendAdds(bookie, adds):
                    for entry_id, entry in adds:
                        self._add(client, bookie, entry_id, entry)
                case ev.Confirm(first, adds, None):
                    self._confirm(first + len(adds) - 1)
                case ev.Confirm() | ev.Failed():
                    pass
                case ev.ChooseBookies(positions, exclude):
                    queue.extend(self._choose(client, positions, exclude))
                case ev.WriteMetadata(metadata, version):
                    self._send(("m", client, metadata, version, True))
                case ev.ReadMetadata():
                    self._send(("m", client, None, 0, True))
                case ev.ReadLastConfirmed(bookie):
                    self._send(("l", client, bookie, True))
                case ev.ReadEntries(bookie, first, last, stripe):  # each is answered by itself
                    for entry_id in stripe.ids(first, last):
                        self._send(("r", client, bookie, entry_id, True))
                case ev.Finished(metadata):
                    assert self.metadata.closed
                    assert _end(metadata) == _end(self.metadata), "somebody believes in another end"
                case instruction:
                    raise AssertionError(instruction)

    def _choose(
        self, client: int, positions: tuple[int, ...], exclude: tuple[str, ...]
    ) -> list[ev.Instruction]:
        """The first that are left: which one makes no difference, since a dead one fails like a living one."""
        core = self._core(client)
        left = [name for name in self.shape.names if name not in exclude]
        if len(left) < len(positions):
            return core.handle(ev.NoBookies("none is left"))
        return core.handle(ev.BookiesChosen(dict(zip(positions, left))))

    def _confirm(self, last: int) -> None:
        assert last > self.confirmed, "an entry was confirmed twice"
        self.confirmed = last

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See World."""
        metadata = self.metadata
        for client in self._own:
            self._core(client).check()
        if metadata.closed:
            assert metadata.last_entry >= self.confirmed, (
                f"truncated: closed at entry {metadata.last_entry}, entry {self.confirmed} was acknowledged"
            )
        for entry_id in range(max(self.confirmed, metadata.last_entry) + 1):
            copies = self._copies(entry_id)
            assert len(copies) >= self.shape.ack_quorum, (
                f"entry {entry_id} is stored by {len(copies)} bookies of its write set"
            )
            assert len(dict.fromkeys(copies)) == 1, f"the copies of entry {entry_id} differ"
        self._check_at_rest()

    def _copies(self, entry_id: int) -> list[bytes]:
        bookies = self.metadata.ensemble_of(entry_id).bookies
        write_set = [bookies[position] for position in self.metadata.striping.write_set(entry_id)]
        return [e for name in write_set if (e := self.bookies[name].entries.get(entry_id)) is not None]

    def _check_at_rest(self) -> None:
        """A client that no message is on its way for must not wait for one."""
        awaited = {message[1] for message in self.messages}
        writer = self.writer
        if WRITER not in awaited:
            assert not writer.pending, "the writer waits for an answer that cannot come"
            busy = (WriterState.CHANGING, WriterState.DRAINING, WriterState.SEALING, WriterState.JUDGING)
            assert writer.state not in busy, f"the writer hangs in {writer.state}"
        for client, core in enumerate(self.recoverers, 1):
            if core is not None and client not in awaited:
                assert core.state is RecoveryState.DONE, f"a recovery hangs in {core.state}"

    # --- identity ----------------------------------------------------------------------------------------------------

    def key(self) -> Hashable:
        """See World: the least key of all orders of bookies that look alike, so that their names do not matter."""
        if not self.shape.symmetric:
            return self._key({name: index for index, name in enumerate(self.shape.names)})
        looks = {name: self._looks(name) for name in self.shape.names}
        alike = [list(group) for _, group in groupby(sorted(looks, key=looks.__getitem__), looks.__getitem__)]
        best: tuple[Any, ...] | None = None
        for order in product(*(permutations(group) for group in alike)):
            names = [name for group in order for name in group]
            key = self._key({name: index for index, name in enumerate(names)})
            if best is None or key < best:
                best = key
        return best

    def _looks(self, name: str) -> tuple[Any, ...]:
        """What can be said of a bookie without naming others; equal for bookies that might be exchanged."""
        bookie = self.bookies[name]
        mail = sorted((m[0], m[1], m[3] if m[0] in "aArR" else 0) for m in self.messages if m[2] == name)
        member = tuple(name in ensemble.bookies for ensemble in self.metadata.ensembles)
        return (bookie.alive, bookie.fenced, tuple(sorted(bookie.entries)), member, tuple(mail))

    def _key(self, number: dict[str, int]) -> tuple[Any, ...]:
        symmetric = self.shape.symmetric
        bookies = tuple(
            (b.alive, b.fenced, tuple(sorted((e, lac_of(data)) for e, data in b.entries.items())))
            for b in (self.bookies[name] for name in sorted(number, key=number.__getitem__))
        )
        messages = tuple(sorted(message_key(m, number, symmetric) for m in self.messages))
        clients = tuple(self._core_key(client, number) for client in range(1 + len(self.recoverers)))
        return (
            bookies,
            metadata_key(self.metadata, number, symmetric),
            self.version,
            messages,
            clients,
            (self.crashes, self.losses, self.confirmed, self.close_asked),
        )

    def _core_key(self, client: int, number: dict[str, int]) -> tuple[Any, ...]:
        keys = self._keys.get(client)
        order = tuple(number)
        if keys is None:
            keys = self._keys[client] = {}
        key = keys.get(order)
        if key is None:
            symmetric = self.shape.symmetric
            if client == WRITER:
                key = writer_key(self.writer, number, symmetric)
            else:
                key = recovery_key(self.recoverers[client - 1], number, symmetric)
            keys[order] = key
        return key


def _end(metadata: LedgerMetadata) -> tuple[int, int]:
    return metadata.last_entry, metadata.length


def _in_order(message: Message) -> bool:
    """Adds that are waited for, and their good answers: one connection carries them."""
    return (message[0] == "a" and message[-1]) or (message[0] == "A" and not message[-1])


def _identity(message: Message) -> Message:
    """Hashable, equal for messages with equal effects."""
    return tuple(id(part) if isinstance(part, LedgerMetadata) else part for part in message)


def _text(message: Message) -> str:
    who = "writer" if message[1] == WRITER else f"recoverer {message[1]}"
    match message:
        case ("a", _, name, entry_id, *_):
            return f"add of entry {entry_id} from {who} at {name}"
        case ("A", _, name, entry_id, code):
            return f"answer {code} of {name} to the add of entry {entry_id} from {who}"
        case ("l", _, name, _):
            return f"fence and LAC read from {who} at {name}"
        case ("L", _, name, lac, code):
            return f"LAC {lac} (code {code}) of {name} at {who}"
        case ("r", _, name, entry_id, _):
            return f"read of entry {entry_id} from {who} at {name}"
        case ("R", _, name, entry_id, _, code):
            return f"entry {entry_id} (code {code}) of {name} at {who}"
        case ("m", _, metadata, version, _):
            what = "read" if metadata is None else f"{metadata.state.name} {metadata.ensembles}"
            return f"metadata {what} at version {version} from {who}"
        case _:
            return f"metadata answer {message[2]!r:.60} version {message[3]} at {who}"


__all__ = ["Bookie", "LedgerState", "LedgerWorld", "MagnetarError", "PendingAdd", "Shape"]
