"""Identity: how worlds look from outside, whatever their bookies are called. And texts for people."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import permutations
from typing import Any

from magnetar.ledger.core.recovery import MAX_STARTS, RecoveryCore, RecoveryState
from magnetar.ledger.core.writer import WriterCore, WriterState
from magnetar.proto.errors import LedgerFenced

from .core_table import CoreTable, Numbers
from .keys import bits_key, metadata_key, set_key
from .ledger_world import WRITER
from .shape import Shape

LIVE = (WriterState.WRITING, WriterState.CHANGING, WriterState.DRAINING)
# Writer, recoverers, bookies, metadata, messages (sorted), crashes, losses, confirmed, close_asked.
State = tuple[Any, ...]


class Looks(CoreTable):
    """Keys of states."""

    def __init__(self, shape: Shape, core_checks: bool) -> None:
        super().__init__(shape, core_checks)
        self._ids = Numbers()  # of parts of keys
        renamed = permutations(range(shape.bookies)) if shape.symmetric else [tuple(range(shape.bookies))]
        self._orders = [
            (tuple(order), {self.names[old]: new for new, old in enumerate(order)}) for order in renamed
        ]
        # Recoverers do not have names either: by position in the key, and the client number that each gets there.
        self._turns = [
            (turn, (WRITER, *(turn.index(client) + 1 for client in range(shape.recoverers)), -1))
            for turn in permutations(range(shape.recoverers))
        ]
        # Bookies' least look, and the orders that make it so.
        self._bookie_orders: dict[tuple[int, ...], tuple[tuple[int, ...], list[int]]] = {}
        self._core_keys: list[dict[int, int]] = [{-1: -1} for _ in self._orders]
        self._meta_keys: list[dict[int, int]] = [{} for _ in self._orders]
        self._message_keys: list[dict[int, int]] = [{} for _ in range(len(self._orders) * len(self._turns))]
        self._prefixes: dict[tuple[Any, ...], tuple[int, tuple[int, ...]]] = {}

    def key(self, state: State) -> Hashable:
        """See Model: the least key of all orders of bookies and of recoverers."""
        found = self._prefixes.get(state[:4])
        if found is None:
            found = self._prefixes[state[:4]] = self._prefix(*state[:4])
        prefix, orders = found
        messages = state[4]
        best: list[int] | None = None
        for order in orders:
            keys = self._message_keys[order]
            try:
                mail = [keys[number] for number in messages]
            except KeyError:
                for number in messages:
                    if number not in keys:
                        keys[number] = self._message_key(order, number)
                mail = [keys[number] for number in messages]
            mail.sort()
            if best is None or mail < best:
                best = mail
        assert best is not None
        return (prefix, *best, -1, *state[5:])

    def _prefix(
        self, writer: int, recoverers: tuple[int, ...], bookies: tuple[int, ...], meta: int
    ) -> tuple[int, tuple[int, ...]]:
        """Of all but messages: its number, and the orders that make it least."""
        found = self._bookie_orders.get(bookies)
        if found is None:
            looks = [tuple(bookies[old] for old in order) for order, _ in self._orders]
            least = min(looks)
            found = (least, [index for index, look in enumerate(looks) if look == least])
            self._bookie_orders[bookies] = found
        renamed, indices = found
        best: tuple[int, ...] | None = None
        orders: list[int] = []
        turns = self._turns
        for index in indices:
            keys = self._core_keys[index]
            cores = [keys[core] if core in keys else self._core_key(index, core) for core in recoverers]
            look = (
                self._meta_key(index, meta),
                keys[writer] if writer in keys else self._core_key(index, writer),
            )
            for turn, (clients, _) in enumerate(turns):
                key = (*look, *[cores[client] for client in clients])
                if best is None or key < best:
                    best, orders = key, [index * len(turns) + turn]
                elif key == best:
                    orders.append(index * len(turns) + turn)
        assert best is not None
        return self._ids.of(("prefix", renamed, best), None), tuple(orders)

    def _core_key(self, index: int, number: int) -> int:
        key = self._core_keys[index].get(number)
        if key is None:
            core, numbers = self.cores.things[number], self._orders[index][1]
            symmetric = self.shape.symmetric
            look = (
                _writer_key(core, numbers, symmetric)
                if isinstance(core, WriterCore)
                else _recovery_key(core, numbers, symmetric)
            )
            key = self._core_keys[index][number] = self._ids.of(("core", look), None)
        return key

    def _meta_key(self, index: int, meta: int) -> int:
        key = self._meta_keys[index].get(meta)
        if key is None:
            look = self._meta_look(meta, self._orders[index][1])
            key = self._meta_keys[index][meta] = self._ids.of(("meta", look), None)
        return key

    def _message_key(self, number_of_order: int, number: int) -> int:
        index, turn = divmod(number_of_order, len(self._turns))
        kind, client, name, *rest = self.messages.things[number]
        numbers = self._orders[index][1]
        if kind in "alrALR":
            body: Any = numbers[name]
        elif kind == "M" and name == "found":
            body, rest = (name, self._meta_look(rest[0], numbers)), []
        elif kind == "m" and name >= 0:
            body = self._meta_look(name, numbers)
        else:
            body = name
        return self._ids.of(("message", kind, self._turns[turn][1][client], body, *rest), None)

    def _meta_look(self, meta: int, numbers: dict[str, int]) -> tuple[Any, ...]:
        metadata, version = self.metas.things[meta]
        return (version, metadata_key(metadata, numbers, self.shape.symmetric))

    def text(self, action: tuple[Any, ...]) -> str:
        """See Model."""
        if action[0] == "append":
            return "the writer appends"
        if action[0] == "close":
            return "the writer closes"
        if action[0] == "begin":
            return f"recoverer {action[1]} begins"
        what, number = action
        message = self.messages.things[number]
        if message[1] < 0:
            return self._describe_orphan(message)
        who = "writer" if message[1] == WRITER else f"recoverer {message[1]}"
        tail = {
            "arrives": "arrives",
            "lost": "is lost",
            "dead": "finds the bookie dead",
            "dies": "finds that the bookie just died",
            "given up": "is given up, and still on its way",
        }[what]
        return f"{self._describe(message, who)} {tail}"

    def picture(self, state: State) -> str:
        """What is there, in a line: bookies, metadata, clients."""
        writer, recoverers, bookies, meta, messages, crashes, losses, confirmed, _ = state
        parts = []
        for name, number in zip(self.names, bookies):
            alive, fenced, entries = self.bookies.things[number]
            kept = ",".join(str(entry_id) for entry_id, _ in entries)
            parts.append(f"{name}{{{kept}}}{' fenced' if fenced else ''}{'' if alive else ' DEAD'}")
        clients = [f"writer {self.cores.things[writer].state.value}, confirmed to {confirmed}"]
        for client, number in enumerate(recoverers, 1):
            told = self.cores.things[number].state.value if number >= 0 else "not begun"
            clients.append(f"recoverer {client} {told}")
        return (
            f"{' '.join(parts)} | {self._meta_text(meta)} | {', '.join(clients)} | {len(messages)} on their way, "
            f"{crashes}+{losses} faults left"
        )

    def _describe(self, message: tuple[Any, ...], who: str) -> str:
        match message:
            case ("a", _, name, entry_id, _, wanted):
                text = f"{who}'s add of entry {entry_id} at {name}"
            case ("A", _, name, entry_id, code):
                return f"answer {code} of {name} to the {who}'s add of entry {entry_id}"
            case ("l", _, name, wanted):
                text = f"{who}'s fence and LAC read at {name}"
            case ("L", _, name, lac, code):
                return f"LAC {lac} (code {code}) of {name} for the {who}"
            case ("r", _, name, entry_id, wanted):
                text = f"{who}'s read of entry {entry_id} at {name}"
            case ("R", _, name, entry_id, _, code):
                return f"entry {entry_id} (code {code}) of {name} for the {who}"
            case ("m", _, meta, version, wanted):
                text = f"{who}'s metadata {self._meta_text(meta)} at version {version}"
            case ("M", _, what, value):
                found = f": {self._meta_text(value)}" if what == "found" else ""
                return f"metadata answer '{what}'{found} for the {who}"
            case _:
                raise AssertionError(message)
        return text if wanted else f"{text}, given up long since,"

    def _describe_orphan(self, message: tuple[Any, ...]) -> str:
        """Nobody waits for it."""
        if message[0] == "l" and self.shape.repairs:
            return f"{message[2]} fences the ledger: it is being repaired, or somebody's fence came late"
        if message[0] == "l":
            return f"a recoverer's fence that was given up or is not waited for comes to {message[2]}"
        if message[0] == "a":
            return f"a recoverer's add of entry {message[3]} that was given up comes to {message[2]}"
        return f"a metadata write that was given up is carried out: {self._meta_text(message[2])}"

    def _meta_text(self, meta: int) -> str:
        if meta < 0:
            return "read"
        metadata, _ = self.metas.things[meta]
        ensembles = " ".join(f"{e.first_entry}:{','.join(e.bookies)}" for e in metadata.ensembles)
        return f"{metadata.state.name} {ensembles}" + (
            f" last={metadata.last_entry}" if metadata.closed else ""
        )


def _writer_key(core: WriterCore, number: dict[str, int], symmetric: bool) -> tuple[Any, ...]:
    """Without what its state makes meaningless."""
    if core.state is WriterState.CLOSED:
        return ("closed",)
    fenced = isinstance(core.error, LedgerFenced)
    if core.state is WriterState.JUDGING or (core.state is WriterState.FAILED and fenced):
        # All that it will ever do is to compare the end that it finds with its own.
        flags = (core.close_requested, core._writing_metadata, core._changing_to is None)
        return (core.state.value, *flags, core.last_add_confirmed, core.confirmed_length)
    bookies = tuple(core._bits)
    changing = core._changing_to
    common = (
        core.state.value,
        core.close_requested,
        core.error is None,
        type(core.error).__name__,
        core.last_add_confirmed,
        core.confirmed_length,
        core.version,
        core._writing_metadata,
        () if changing is None else set_key(changing, number, symmetric),
        metadata_key(core.metadata, number, symmetric),
    )
    if core.state not in LIVE:  # it sends no entry and no longer looks at answers of bookies
        return common
    return (
        *common,
        core.length,
        core.ack_quorum,
        core._first_held if core.state is WriterState.CHANGING else 0,
        tuple(bits_key(add.acked, bookies, number) for add in core.pending),
        tuple(add.entry for add in core.pending),
        tuple(sorted(number[name] for name in core.failed_bookies)),
        tuple(sorted(number[bookies[position]] for position in core._failing)),
        tuple(sorted(number[bookies[position]] for position in core._replaced)),
        set_key(bookies, number, symmetric),
    )


def _recovery_key(core: RecoveryCore, number: dict[str, int], symmetric: bool) -> tuple[Any, ...]:
    """The same. Whom it suspects decides only whom it asks first, and here it asks all."""
    state = core.state
    if state is RecoveryState.DONE:
        return ("done",)
    # How often it started over matters only to when it gives up, which it never does here: versions are fewer.
    assert core.starts < MAX_STARTS, "a recovery started over too often"
    common = (state.value, core.version, metadata_key(core.metadata, number, symmetric))
    if state is RecoveryState.FENCING:
        quorum = core._quorum
        known = bits_key(quorum._known, core._reading, number)
        unknown = tuple(sorted(number[name] for name in quorum._unknown))
        return (*common, quorum.last_add_confirmed, known, unknown)
    if state is RecoveryState.BASE:
        asked = tuple(number[name] for name in core._base_replicas)
        return (*common, core._base, asked, len(core._base_codes))
    changed = (metadata_key(core._changed, number, symmetric), core._last, core._length)
    if state is not RecoveryState.ENTRIES:
        return (*common, changed)
    bookies = core._changed.last_ensemble.bookies
    entries = tuple(
        (entry_id, found.entry, bits_key(found.acked, bookies, number))
        if entry_id < core._next_add
        else (entry_id, found.negatives, len(found.codes), tuple(sorted(number[n] for n in found.answered)))
        for entry_id, found in core._entries.items()
    )
    return (
        *common,
        changed,
        set_key(core._reading, number, symmetric),
        (core._first, core._next_read, core._next_add),
        entries,
        tuple(sorted(number[bookies[position]] for position in core._failing)),
        tuple(sorted(number[bookies[position]] for position in core._unreplaceable)),
        tuple(sorted(number[name] for name in core._excluded)),
    )
