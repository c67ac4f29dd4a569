"""The pointer of a stored state (`snapshot_ledger`): a node of the metadata store, changed by compare-and-set only.

It names the ledger that has the state. Who takes the state over writes the pointer anew, so that the former owner's next
write of it is a conflict: rule 52. Ledgers that it named before stay in its list until they are deleted, so that a crash
leaves none behind.

A write that has begun goes on to its end, and whoever is cancelled meanwhile waits for that. So nothing of a pointer is
under way once those who used it have ended, and no write meets an earlier one of its own: when the outcome of one is not
known, it is looked for before the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec

from magnetar.metadata import MetadataStore
from magnetar.metadata.record import Record
from magnetar.proto.errors import DataDirectoryError, MagnetarError, NotFoundInStore, VersionConflict
from magnetar.runtime.tasks import finish

from ..log.records import replace

NO_LEDGER = -1


class PointerRecord(Record):
    """What the node says (FORMATS.md)."""

    ledger_id: int  # that has the state; NO_LEDGER: `snapshot` has it
    snapshot: list[bytes]  # pieces of the state, as its ledger has them; none: `deleting`
    created_ms: int
    properties: dict[str, str]  # of a subscription: what users noted of it
    trimmed: list[int]  # ledgers that had it and may not be deleted yet
    deleting: bool  # the state does not exist any more; its ledgers may
    active_ms: int = 0  # of a subscription: when it had consumers last, as far as it was noted down


class _Ledgers(msgspec.Struct):
    """What deleting a state takes, of a pointer that cannot be read otherwise."""

    ledger_id: int
    trimmed: list[int]


class Pointer:
    """See the module docstring. `record` is what the node says, once it was created or read."""

    def __init__(self, path: str, metadata: MetadataStore) -> None:
        self.path = path
        self.record = PointerRecord(NO_LEDGER, [], 0, {}, [], False)
        # What the next write says.
        self.active_ms = 0
        self.properties: Mapping[str, str] = {}
        self.damaged = False  # not even its ledgers can be read
        self._metadata = metadata
        self._version = -1
        # The last write, and the version that it replaces: while `known` is False, it may have been done.
        self._written: tuple[int, bytes] | None = None

    @property
    def known(self) -> bool:
        """False before it was read, and after a write of which it is not known whether it was done."""
        return self._version >= 0

    async def create(self, snapshot: list[bytes], now_ms: int) -> None:
        """The state is in the pointer, and durable, when this returns. Raises AlreadyExists."""
        self.record = PointerRecord(NO_LEDGER, snapshot, now_ms, dict(self.properties), [], False)
        await finish(self._create())

    async def _create(self) -> None:
        self._version = await self._metadata.create(self.path, self.record.encode())

    async def read(self) -> None:
        """Raises DataDirectoryError when it is damaged, NotFoundInStore when it is not there.

        VersionConflict when another owner wrote it, or deleted it, since it was read.
        """
        stored = await self._metadata.get(self.path)
        if stored is None and self._written is not None:
            raise VersionConflict(f"{self.path} was deleted by another owner")
        if stored is None:
            raise NotFoundInStore(f"there is no metadata at {self.path}")
        version, value = self._written or (stored.version, b"")
        ours = (
            stored.version == self._version
            if self.known
            else stored.version == version or stored.value == value
        )
        if not ours:
            raise VersionConflict(f"{self.path} was changed by another owner")
        self._version = stored.version
        try:
            self.record = PointerRecord.decode(stored.value, self.path)
            self.active_ms = max(self.active_ms, self.record.active_ms)
        except DataDirectoryError:
            self.damaged = True
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                known = msgspec.msgpack.decode(stored.value, type=_Ledgers)
                self.record.ledger_id, self.record.trimmed = known.ledger_id, known.trimmed
                self.damaged = False
            raise

    async def take(self) -> None:
        """Writes it as it was read. Raises VersionConflict if its former owner wrote it since then: read it again."""
        await finish(self._take())

    async def _take(self) -> None:
        try:
            await self._write(self.record)
        except MagnetarError:
            self._version, self._written = -1, None
            raise

    async def move(self, ledger_id: int, snapshot: list[bytes], *, deleting: bool = False) -> None:
        """Names another ledger, durable when this returns; the one before is in `record.trimmed` then."""
        await finish(self._move(ledger_id, snapshot, deleting=deleting))

    async def _move(self, ledger_id: int, snapshot: list[bytes], *, deleting: bool) -> None:
        if not self.known:
            await self.read()
        old = self.record
        trimmed = old.trimmed
        if old.ledger_id not in (NO_LEDGER, ledger_id):
            trimmed = [*trimmed, old.ledger_id]
        properties = dict(self.properties)
        await self._write(
            PointerRecord(ledger_id, snapshot, old.created_ms, properties, trimmed, deleting, self.active_ms)
        )

    async def _write(self, record: PointerRecord) -> None:
        version, value = self._written = self._version, record.encode()
        self._version = -1
        try:
            self._version = await replace(self._metadata, self.path, value, version)
        except VersionConflict:  # it was not done
            self._version = version
            raise
        self.record = record

    async def delete(self) -> None:
        """The node does not exist any more when this returns."""
        await finish(self._metadata.delete(self.path, version=self._version))
