"""A state that outlives its broker: pieces of bytes in a ledger, and a pointer in metadata that names it.

    ledger    the whole state, piece by piece, then changes of it, each of some pieces
    pointer   the ledger's id; and the state as it was when that ledger was begun, or if that is large its `summary` alone

Every piece is true without those before it. So whatever of the ledger cannot be read costs what it says, and nothing else;
and the state may change between two of its pieces, as long as the change is written as well. A change that takes back what
earlier pieces say raises the state's `generation`, and is written as a whole, in a new ledger.

`replace` begins the next ledger (rule 26): the state to a new ledger, the pointer by compare-and-set, then `delete_former`.
If no ledger can be written, the pointer holds the state itself. One call of these at a time: nothing else is outstanding.

One owner (rule 52): who takes the state over fences its ledger, then writes its pointer, so that a former owner can neither
append nor begin another ledger. Either of these, a fenced ledger or a version conflict, means another owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from magnetar.metadata import MetadataStore
from magnetar.proto.errors import (
    DataDirectoryError,
    EntryDamaged,
    EntryNotFound,
    FinalError,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    TopicBusy,
    VersionConflict,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES

from ..resources.stores import Ledgers, Reader, Writer, delete_ledgers
from .pointer import NO_LEDGER, Pointer

_log = logging.getLogger(__name__)

# Rows that are read back before the loop has its turn: a few milliseconds.
_ROWS_PER_TURN = 4_000


def is_damage(error: MagnetarError) -> bool:
    """True if reading again cannot help; else (a bookie is away, its disk failed) the error may pass."""
    return type(error) is FinalError or isinstance(
        error, (EntryDamaged, EntryNotFound, LedgerNotFound, DataDirectoryError)
    )


class StoredState(Protocol):
    """What is stored. It may change while it is written."""

    @property
    def generation(self) -> int:
        """Rises when pieces that were made before are not true any more."""

    def pieces(self) -> Iterator[bytes]:
        """The whole state; each piece is made when it is asked for, as the state is then."""

    def summary(self) -> bytes:
        """A small piece that is true, for a pointer that has no room for all of them."""


class SnapshotLedger:
    """See the module docstring."""

    def __init__(
        self,
        kind: str,
        path: str,
        state: StoredState,
        metadata: MetadataStore,
        ledgers: Ledgers,
        durability: Callable[[], Mapping[str, Any]],
        taken_over: Callable[[MagnetarError], None],
        *,
        max_entries: int,
        max_inline_bytes: int,
        pause_s: float = 0.0,
    ) -> None:
        """`kind` of state, as its ledgers and the logs name it. `durability`: of its next ledger, for `Ledgers.create`.

        `taken_over` is called when another owner is found; the call that found it raises as well. `max_entries` of a ledger,
        in which the snapshot counts as one; `max_inline_bytes` of the pieces in the pointer.
        `pause_s`: after each turn in which it is read back, so that what others do in several turns is done meanwhile.
        """
        self._kind = kind
        self._name = f"{kind} {path}"
        self._state: StoredState = weakref.proxy(state)  # which owns this
        self.pointer = Pointer(path, metadata)
        self._ledgers = ledgers
        self._durability = durability
        self._taken_over = taken_over
        self._max_entries = max_entries
        self._max_inline_bytes = max_inline_bytes
        self._pause_s = pause_s
        self._writer: Writer | None = None
        self._former: Writer | None = None  # of the ledger that the pointer named before
        self._entries = 0  # in the ledger
        self._rows = 0  # that `recover` has replayed in this turn of the loop
        self.damage = ""  # that `recover` has met so far
        self.changed_rows = 0  # that reading the ledger replays beside the snapshot

    @property
    def path(self) -> str:
        """Of the pointer."""
        return self.pointer.path

    # --- opening -----------------------------------------------------------------------------------------------------

    async def create(self, now_ms: int) -> None:
        """Records the state as a new one; durable when it returns. Raises AlreadyExists."""
        await self.pointer.create(list(self._state.pieces()), now_ms)

    async def recover(self, apply: Callable[[bytes], Iterable[int]]) -> bool:
        """Takes the state over: gives each piece of it to `apply`, which returns, step by step, how many rows it has.

        Its ledger is fenced and closed on the way; what is damaged there is left out, and said in `damage`. False if the
        state was being deleted: call `delete` then, which is all that can be done after DataDirectoryError as well: the
        pointer is damaged. NotFoundInStore: it is not there. Any other error may pass, and this may be called again.
        """
        pointer = self.pointer
        with self._noticing_another_owner():
            await pointer.read()
        if pointer.record.deleting:
            return False
        await self.delete_former()
        if not pointer.record.snapshot:
            raise DataDirectoryError(f"the metadata of {self.path} is damaged: it has no snapshot")
        for piece in pointer.record.snapshot:
            await self._apply(apply, piece)
        if pointer.record.ledger_id != NO_LEDGER:
            await self._read_ledger(pointer.record.ledger_id, apply)
        await pointer.take()
        pointer.record.snapshot = []  # `apply` has it
        pointer.properties = pointer.record.properties
        return True

    async def _apply(self, apply: Callable[[bytes], Iterable[int]], piece: bytes) -> None:
        self._rows += 1
        for rows in apply(piece):
            self._rows += rows
            if self._rows >= _ROWS_PER_TURN:
                self._rows = 0
                await asyncio.sleep(self._pause_s)

    async def _read_ledger(self, ledger_id: int, apply: Callable[[bytes], Iterable[int]]) -> None:
        first, last = 0, 0
        reader: Reader | None = None
        damage: list[MagnetarError] = []

        def note(error: MagnetarError) -> None:
            damage.append(error)
            self.damage = (
                f"{len(damage)} of {last + 1} entries of its ledger {ledger_id} cannot be read ({damage[0]})"
            )

        while first <= last:
            try:
                if reader is None:
                    reader = await self._ledgers.open(ledger_id, recover=True)
                    last = max(reader.last_add_confirmed, 0)  # it is not pointed to before it has a snapshot
                entries = await reader.read(first, last, max_bytes=1 << 20)
            except MagnetarError as error:
                if not is_damage(error):
                    raise
                note(error)
                first += 1
                continue
            for entry in entries:
                try:
                    await self._apply(apply, entry[LEDGER_ENTRY_HEADER_BYTES:])
                except DataDirectoryError as error:
                    note(error)
            first += len(entries)

    @contextlib.contextmanager
    def _noticing_another_owner(self) -> Iterator[None]:
        try:
            yield
        except (VersionConflict, LedgerFenced) as error:
            self._taken_over(error)
            raise

    # --- writing -----------------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> tuple[int, int]:
        """The one that is written to, and its last entry; -1 and -1: none now."""
        return (-1, -1) if self._writer is None else (self._writer.ledger_id, self._entries - 1)

    @property
    def has_room(self) -> bool:
        """True if a ledger is open that takes changes: `append`. Else `replace`."""
        return self._writer is not None and self._entries < self._max_entries

    @property
    def replaceable(self) -> bool:
        """A ledger is open, and a better one could be made now (`Writer.replaceable`)."""
        return self._writer is not None and self._writer.replaceable

    async def append(self, piece: bytes, rows: int) -> None:
        """A change of so many rows; durable when it returns."""
        assert self._writer is not None
        with self._noticing_another_owner():
            await self._append(self._writer, piece)
        self._entries += 1
        self.changed_rows += rows

    async def replace(self) -> None:
        """Makes the whole state durable: in a new ledger, else in the pointer. `delete_former` afterwards."""
        with self._noticing_another_owner():
            try:
                await self._begin_ledger()
            except (VersionConflict, LedgerFenced):
                raise
            except MagnetarError as error:
                _log.warning(
                    "%s: its state is written to metadata, since no ledger can be written: %s",
                    self._name,
                    error,
                )
                await self._write_pointer()

    async def delete_former(self) -> None:
        """Deletes what the pointer no longer names; what fails is tried again at the next call or opening.

        To be called after `replace`, not after each `append`: what cannot be deleted for a while would hold up all of them.
        """
        former, self._former = self._former, None
        if former is not None:
            with contextlib.suppress(MagnetarError):
                await former.close()
        if self.pointer.record.trimmed:
            await delete_ledgers(self._ledgers, self.pointer.record.trimmed, self._name)

    def _leave_ledger(self) -> None:
        if self._writer is not None:
            self._former, self._writer = self._writer, None

    async def _begin_ledger(self) -> None:
        self._leave_ledger()
        while True:
            generation = self._state.generation
            writer = await self._ledgers.create(
                **self._durability(),
                properties={"kind": self._kind, self._kind: self.path},
                explicit_lac=False,
            )
            try:
                snapshot = await self._append_state(writer)
            except BaseException:
                with contextlib.suppress(MagnetarError):
                    await self._ledgers.delete(writer.ledger_id)
                raise
            if generation == self._state.generation:
                break
            writer.detach()
            with contextlib.suppress(MagnetarError):
                await self._ledgers.delete(writer.ledger_id)
        try:
            await self.pointer.move(writer.ledger_id, snapshot)
        except BaseException:
            writer.detach()  # the stored pointer may name the new ledger, so it stays
            raise
        self._writer = writer
        self._entries, self.changed_rows = 1, 0

    async def _append_state(self, writer: Writer) -> list[bytes]:
        """The state becomes entries of the ledger. Returns what goes into the pointer."""
        inline: list[bytes] = []
        size = 0
        for piece in self._state.pieces():
            await self._append(writer, piece)
            size += len(piece)
            if size <= self._max_inline_bytes:
                inline.append(piece)
        return inline if size <= self._max_inline_bytes else [self._state.summary()]

    async def _append(self, writer: Writer, piece: bytes) -> None:
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        writer.append(piece, lambda _entry_id, _entry, error: resolve(confirmed, error))
        await confirmed

    async def _write_pointer(self) -> None:
        self._leave_ledger()
        pieces = await self._pieces()
        assert pieces is not None
        await self.pointer.move(NO_LEDGER, pieces)

    async def _pieces(self, most_bytes: int | None = None) -> list[bytes] | None:
        """The whole state, with a turn of the loop for each piece; None if they have more than `most_bytes`."""
        while True:
            generation, size = self._state.generation, 0
            pieces: list[bytes] = []
            for piece in self._state.pieces():
                if pieces:
                    await asyncio.sleep(0)
                pieces.append(piece)
                size += len(piece)
                if most_bytes is not None and size > most_bytes:
                    return None
            if generation == self._state.generation:
                return pieces

    # --- ending ------------------------------------------------------------------------------------------------------

    async def fits_pointer(self) -> bool:
        """True if the pointer has room for the whole state."""
        return await self._pieces(self._max_inline_bytes) is not None

    async def close(self, *, changed: bool, small: bool) -> None:
        """Closes the ledger, if there is one; a state that has `changed` or is `small` is in the pointer alone then.

        A pointer opens faster than a ledger. Raises what failed: then the next owner recovers the ledger.
        """
        if changed or (small and self.pointer.record.ledger_id != NO_LEDGER):
            with self._noticing_another_owner():
                await self._write_pointer()
            await self.delete_former()
        elif self._writer is not None:
            await self._writer.close()

    def detach(self) -> None:
        """Nothing is written any more: the ledger is another owner's, or is about to be deleted."""
        for writer in (self._writer, self._former):
            if writer is not None:
                writer.detach()

    async def delete(self) -> None:
        """The state does not exist from the first write on; its ledgers and pointer are deleted when this returns.

        Raises TopicBusy if a ledger cannot be deleted yet.
        """
        pointer = self.pointer
        if not pointer.known:
            with contextlib.suppress(DataDirectoryError), self._noticing_another_owner():
                await pointer.read()
        self.detach()
        with self._noticing_another_owner():
            await delete_stored(pointer, self._ledgers, self._kind)


async def delete_stored(pointer: Pointer, ledgers: Ledgers, kind: str) -> None:
    """What a pointer that was read names, and the pointer. Raises TopicBusy if a ledger cannot be deleted yet.

    VersionConflict: another owner has changed the pointer since then; nothing of his is deleted.
    """
    if pointer.damaged:
        _log.warning(
            "%s %s: deleted; nothing of it can be read, so that its ledger, if it has one, stays: the ledger whose "
            "property `%s` is this path", kind, pointer.path, kind,
        )  # fmt: skip
        await pointer.delete()
        return
    await pointer.move(NO_LEDGER, [], deleting=True)
    await delete_ledgers(ledgers, pointer.record.trimmed, f"{kind} {pointer.path}")
    if pointer.record.trimmed:
        raise TopicBusy(
            f"the ledgers of the {kind} at {pointer.path} could not be deleted yet; delete it again"
        )
    await pointer.delete()


def resolve(future: asyncio.Future[None], error: MagnetarError | None) -> None:
    """A confirmation has come; whoever waited may be cancelled."""
    if not future.done():
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
