"""Which bookies there are, their addresses, and their state: labels, free space, whether they take entries.

Ledger metadata names a bookie by its id, which never changes; its address may. The state comes with the registration, or,
for a static list of bookies, from `bookie_info_reader`, which asks them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgpack

from magnetar.metadata.store import MetadataStore, Watch
from magnetar.metadata.timed import TimedStore
from magnetar.proto.bookie_identity import NOT_KNOWN, BookieIdentity
from magnetar.proto.errors import BookieUnavailable, DataDirectoryError, InvalidSetting
from magnetar.runtime.tasks import LongTask, on_change

_log = logging.getLogger(__name__)

_RETRY_MAX_S = 4.0  # after the list of registered bookies could not be read

BOOKIES_PATH = "/bookies"

Address = tuple[str, int]


class Labels(NamedTuple):
    """The rack and zone of a bookie, and the group that it belongs to; "" is none, or not known."""

    rack: str = ""
    zone: str = ""
    group: str = ""


NO_LABELS = Labels()


@dataclass(frozen=True, slots=True)
class BookieFacts:
    """The state that a bookie reports."""

    labels: Labels = NO_LABELS
    free_bytes: int = 0  # of its ledger directories; 0: not known
    read_only: bool = False
    read_only_reason: str = ""  # "" if it is not, or if it does not say
    journal_stalled_s: float = 0.0  # so long adds have waited there without any becoming durable

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> BookieFacts:
        """From the map of BookieInfo or of a registration, which have the same keys. What does not fit is not known."""
        labels = (info.get(name) for name in Labels._fields)
        free_bytes = info.get("free_bytes")
        stalled_s, reason = info.get("journal_stalled_s"), info.get("read_only_reason")
        return cls(
            Labels(*(label if isinstance(label, str) else "" for label in labels)),
            free_bytes if isinstance(free_bytes, int) and free_bytes > 0 else 0,
            info.get("read_only") is True,
            reason if isinstance(reason, str) else "",
            float(stalled_s)
            if isinstance(stalled_s, int | float) and stalled_s is not True and stalled_s > 0
            else 0.0,
        )

    @property
    def refusal(self) -> str:
        """Why it takes no new entries, as it says; "" if it takes them."""
        if self.read_only:
            return f"read-only: {self.read_only_reason}" if self.read_only_reason else "read-only"
        return f"its journal hangs, for {self.journal_stalled_s:.0f} s" if self.journal_stalled_s else ""


UNKNOWN_FACTS = BookieFacts()


class BookieDirectory(Protocol):
    """The bookies that are up, as far as is known here; read in the loop, so it answers from memory."""

    def writable(self) -> Sequence[str]:
        """Ids of the bookies that take new entries, sorted. The same object as long as they are the same."""
        ...

    def refusals(self) -> Mapping[str, str]:
        """Why each of the other bookies takes no new entries, as far as is known: for people."""
        ...

    def draining(self, bookie: str) -> bool:
        """Whether its ledgers are to move to other bookies; it is not writable then, and works."""
        ...

    def address(self, bookie: str) -> Address:
        """Where it listens. BookieUnavailable if that is not known."""
        ...

    def labels(self, bookie: str) -> Labels:
        """Its rack, zone and group, as last reported."""
        ...

    def identity(self, bookie: str) -> BookieIdentity:
        """Who it is, as this process has verified it; NOT_KNOWN if it has not."""
        ...

    def free_bytes(self, bookie: str) -> int:
        """Its free space, as last reported; 0 if it is not known."""
        ...

    def return_count(self, bookie: str) -> int:
        """How often it came back: registered again, or answered after a silence. Earlier failures do not count then."""
        ...

    def suspected(self, bookie: str) -> None:
        """Somebody found that it does not work: a directory that can ask how it is does so soon."""
        ...


def parse_address(text: str) -> Address:
    """`host:port` or `[v6 host]:port`. Raises InvalidSetting."""
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidSetting(f"not a bookie address: {text!r} (want host:port)")
    return host.removeprefix("[").removesuffix("]"), int(port)


class _Bookies:
    """What a directory remembers of each bookie; addresses, facts and returns outlive its registration."""

    def __init__(self, addresses: Mapping[str, Address], writable: tuple[str, ...]) -> None:
        self.identity: Callable[[str], BookieIdentity] = lambda _: (
            NOT_KNOWN
        )  # set by the owner of a transport
        self._addresses = dict(addresses)
        self._facts: dict[str, BookieFacts] = {}
        self._returns: dict[str, int] = {}
        self._writable = writable

    def writable(self) -> Sequence[str]:
        return self._writable

    def draining(self, bookie: str) -> bool:
        """See BookieDirectory: drained bookies are left out by `PlacedBookies`."""
        return False

    def labels(self, bookie: str) -> Labels:
        """See BookieDirectory: a replacement takes the labels of lost bookies into account."""
        return self._facts.get(bookie, UNKNOWN_FACTS).labels

    def free_bytes(self, bookie: str) -> int:
        return self._facts.get(bookie, UNKNOWN_FACTS).free_bytes

    def return_count(self, bookie: str) -> int:
        return self._returns.get(bookie, 0)

    def _has_returned(self, bookie: str) -> None:
        self._returns[bookie] = self.return_count(bookie) + 1

    def _set_writable(self, names: tuple[str, ...]) -> None:
        if names != self._writable:
            self._writable = names


class StaticBookies(_Bookies):
    """A list from the settings: ids with addresses, or `host:port` texts that are both.

    Nobody registers here, so all of them count as writable until a `BookieInfoReader` says otherwise.
    """

    def __init__(self, bookies: Sequence[str] | Mapping[str, Address]) -> None:
        addresses = (
            bookies if isinstance(bookies, Mapping) else {name: parse_address(name) for name in bookies}
        )
        self.names = tuple(sorted(addresses))
        super().__init__(addresses, self.names)
        self._lost: dict[str, None] = {}  # did not answer, are suspected not to, or take no adds
        # Asks the bookie for its state soon; None: nothing does.
        self.on_suspected: Callable[[str], None] | None = None

    def refusals(self) -> Mapping[str, str]:
        return {
            name: self._facts.get(name, UNKNOWN_FACTS).refusal or "it failed, or does not answer"
            for name in self.names
            if name not in self._writable
        }

    def address(self, bookie: str) -> Address:
        if bookie not in self._addresses:
            raise BookieUnavailable(
                f"bookie {bookie} is not in the list of bookies ({', '.join(self.names)})"
            )
        return self._addresses[bookie]

    def suspected(self, bookie: str) -> None:
        """See BookieDirectory: not writable until it answers. Does nothing without `on_suspected`."""
        if self.on_suspected is not None and bookie in self._addresses:
            self.lost(bookie)
            self.on_suspected(bookie)

    def answered(self, bookie: str, facts: BookieFacts, *, hung: bool = False) -> None:
        """The bookie answered. `hung`: its process does, but its journal makes nothing durable."""
        self._facts[bookie] = facts
        if hung:
            self._lost[bookie] = None
        elif bookie in self._lost:
            del self._lost[bookie]
            self._has_returned(bookie)
        self._changed()

    def lost(self, bookie: str) -> None:
        """The bookie did not answer. Its last reported state stays known."""
        if bookie not in self._lost:  # a broken connection reports each of thousands of adds
            self._lost[bookie] = None
            self._changed()

    def _changed(self) -> None:
        well = (name for name in self.names if name not in self._lost)
        self._set_writable(tuple(name for name in well if not self._facts.get(name, UNKNOWN_FACTS).read_only))


def encode_registration(
    address: str,
    *,
    read_only: bool = False,
    rack: str = "",
    zone: str = "",
    group: str = "",
    free_bytes: int = 0,
    read_only_reason: str = "",
    journal_stalled_s: float = 0.0,
    incarnation: int = 0,
    problems: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """The value of a bookie's ephemeral node `/bookies/<id>`; written again when one of them changed, `free_bytes` much.

    `journal_stalled_s` is 0 until the bookie counts its journal as hung (`journal_stall_s`), and again when it goes on.
    `problems`: what else is wrong there, by what it is about.
    `incarnation` is another one at each start, so that a bookie that is back is distinguished from the one that failed.
    """
    data: bytes = msgpack.packb(
        {
            "address": address,
            "read_only": read_only,
            "read_only_reason": read_only_reason,
            "rack": rack,
            "zone": zone,
            "group": group,
            "free_bytes": free_bytes,
            "journal_stalled_s": journal_stalled_s,
            "incarnation": incarnation,
            "problems": dict(problems),
        }
    )
    return data


def decode_registration(value: bytes, bookie: str) -> dict[str, Any]:
    """The map of such a node; its address can be parsed. DataDirectoryError."""
    try:
        fields = dict(msgpack.unpackb(value))
        parse_address(fields["address"])
    except (ValueError, TypeError, KeyError, AttributeError, InvalidSetting) as error:
        raise DataDirectoryError(
            f"the registration of bookie {bookie} cannot be read: {error!r}; restart the bookie, or, if there is none of "
            f"this name, delete {BOOKIES_PATH}/{bookie} from the metadata"
        ) from None
    return fields


class _Registration(NamedTuple):
    """What was read of a node."""

    version: int
    incarnation: object
    address: Address
    takes_adds: bool

    def is_back(self, before: _Registration | None) -> bool:
        """Whether the bookie that wrote it is not the one that was there before, or takes adds again."""
        return (
            before is None
            or self.version < before.version
            or (self.incarnation, self.address) != (before.incarnation, before.address)
            or (self.takes_adds and not before.takes_adds)
        )


class RegisteredBookies(_Bookies):
    """The bookies registered under /bookies in the metadata store, kept up to date by a watch."""

    def __init__(self, metadata: MetadataStore) -> None:
        super().__init__({}, ())
        self._metadata = metadata
        self._registered: dict[str, _Registration] = {}  # now
        self._watch: Watch | None = None
        self._changed = asyncio.Event()
        self._task: LongTask | None = None

    @classmethod
    async def open(cls, metadata: MetadataStore, *, metadata_timeout_s: float = 10.0) -> RegisteredBookies:
        """Reads the list and follows it from then on. RequestTimeout, and others of the store; nothing is left then."""
        directory = cls(TimedStore(metadata, metadata_timeout_s))
        directory._watch = metadata.watch(BOOKIES_PATH, lambda _: directory._changed.set())
        try:
            await directory._read()
        except BaseException:
            directory._watch.close()
            raise
        read = partial(on_change, directory._changed, directory._read)
        directory._task = LongTask("the directory of bookies", read, retry_max_s=_RETRY_MAX_S)
        return directory

    def refusals(self) -> Mapping[str, str]:
        return {
            name: self._facts[name].refusal if name in self._registered else "it is not registered any more"
            for name in self._facts
            if name not in self._writable
        }

    def address(self, bookie: str) -> Address:
        """See BookieDirectory. A bookie that vanished keeps its last address: it may be back before its node is."""
        if bookie not in self._addresses:
            raise BookieUnavailable(f"bookie {bookie} is not registered")
        return self._addresses[bookie]

    def suspected(self, bookie: str) -> None:
        """See BookieDirectory. Does nothing: its session shows whether the bookie lives."""

    async def close(self) -> None:
        """Stops following."""
        if self._watch is not None:
            self._watch.close()
        if self._task is not None:
            await self._task.close()
            self._task = None

    async def _read(self) -> None:
        found: dict[str, _Registration] = {}
        for name in await self._metadata.children(BOOKIES_PATH):
            node = await self._metadata.get(f"{BOOKIES_PATH}/{name}")
            if node is None:
                continue
            try:
                fields = decode_registration(node.value, name)
            except DataDirectoryError as error:
                _log.warning("%s", error)
                continue
            address = self._addresses[name] = parse_address(fields["address"])
            facts = self._facts[name] = BookieFacts.of(fields)
            takes_adds = not facts.read_only and not facts.journal_stalled_s
            found[name] = _Registration(node.version, fields.get("incarnation"), address, takes_adds)
        before, self._registered = self._registered, found
        for name, registration in found.items():
            if registration.is_back(before.get(name)):
                self._has_returned(name)
        self._set_writable(tuple(name for name, registration in found.items() if registration.takes_adds))
