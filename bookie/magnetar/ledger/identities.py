"""Which bookie a ledger client believes (rule 35), and whether its metadata store knows enough ledger ids (rule 36).

Each connection to a bookie begins with an introduction:

    expected = identities.expected(bookie)      ->  CONNECT: the bookie refuses it, or says who it is in CONNECTED
    identities.verify(bookie, expected, found)  ->  True: the connection may be used
                                                ->  False: the bookie's start is registered now; connect again and say so

Nothing is sent to a bookie before its present start is registered in the metadata store. Otherwise nobody would notice that
an older copy of its disks has come in its place, which lacks what it has confirmed since. A verified bookie is remembered,
so that reads and writes of known bookies do not wait for the metadata store.

Two cases are not noticed: a bookie whose disks are put back to a snapshot that was taken while the registered start ran, and
a restored bookie that has started MAX_INCARNATIONS times without any ledger client connecting to it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec

from magnetar.metadata.identity import register_cookie, registered_cookie
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.store import MetadataStore
from magnetar.metadata.timed import TimedStore
from magnetar.proto.bookie_identity import NOT_KNOWN, BookieIdentity, mismatch
from magnetar.proto.errors import WrongBookie

_log = logging.getLogger(__name__)

# The bookie may restart and another client may register it in between, but not as often as this.
MOST_INTRODUCTIONS = 5


class BookieIdentities(Protocol):
    """What a transport asks for each connection; see the module."""

    async def expected(self, bookie: str) -> BookieIdentity:
        """What CONNECT says. RequestTimeout, and others of the metadata store."""
        ...

    async def verify(self, bookie: str, expected: BookieIdentity, found: BookieIdentity | None) -> bool:
        """Compares what CONNECTED said; see the module. WrongBookie, and others of the metadata store."""
        ...

    def forget(self, bookie: str) -> bool:
        """The bookie refused what was expected of it. True if that may be out of date: it is found out anew."""
        ...


class GivenIdentities:
    """Those that another process has verified, by bookie: this one has no metadata store, and registers nothing.

    A bookie that is not among them is believed to be the one that is meant.
    """

    def __init__(self, identities: Mapping[str, BookieIdentity]) -> None:
        self._identities = identities

    async def expected(self, bookie: str) -> BookieIdentity:
        return self._identities.get(bookie, NOT_KNOWN)

    async def verify(self, bookie: str, expected: BookieIdentity, found: BookieIdentity | None) -> bool:
        """See BookieIdentities. The bookie may have started again since."""
        if expected.instance:
            _check(bookie, expected, found)
        return True

    def forget(self, bookie: str) -> bool:
        return False


class StoredIdentities:
    """Those of the metadata store, whose instance is `cluster`."""

    def __init__(self, store: MetadataStore, cluster: int, *, metadata_timeout_s: float = 10.0) -> None:
        self._store = TimedStore(store, metadata_timeout_s)
        self._cluster = cluster
        # By bookie: the start that is registered and was compared with the store's ledger ids.
        self._verified: dict[str, BookieIdentity] = {}

    def known(self, bookie: str) -> BookieIdentity:
        """The bookie as it was verified last; NOT_KNOWN if it was not."""
        return self._verified.get(bookie, NOT_KNOWN)

    async def expected(self, bookie: str) -> BookieIdentity:
        if (verified := self._verified.get(bookie)) is not None:
            return verified
        cookie = await registered_cookie(self._store, bookie)
        # After the cookie: an id from here on belongs to a ledger that is made after the start which is registered.
        next_id = await self._next_ledger_id()
        return msgspec.structs.replace(cookie.identity, cluster=self._cluster, next_ledger_id=next_id)

    async def verify(self, bookie: str, expected: BookieIdentity, found: BookieIdentity | None) -> bool:
        try:
            identity = _check(bookie, expected, found)
        except WrongBookie:
            self._verified.pop(bookie, None)  # it may be replaced in the store
            raise
        if identity.is_same_start(expected):
            if expected.next_ledger_id >= 0:
                await self._check_ledger_ids(bookie, identity, expected.next_ledger_id)
                self._verified[bookie] = msgspec.structs.replace(identity, next_ledger_id=-1, replaces=False)
            return True
        self._verified.pop(bookie, None)
        if await register_cookie(self._store, bookie, expected, identity):
            if expected.instance and expected.instance != identity.instance:
                _log.warning(
                    "bookie %s takes the place of one that lost its disks, as its operator declared", bookie
                )
        return False

    def forget(self, bookie: str) -> bool:
        """See BookieIdentities. The bookie may have been replaced in the store since it was verified."""
        return self._verified.pop(bookie, None) is not None

    async def _check_ledger_ids(self, bookie: str, found: BookieIdentity, next_id: int) -> None:
        if found.next_ledger_id > next_id:
            next_id = await self._next_ledger_id()  # others may have drawn some meanwhile
        if found.next_ledger_id > next_id:
            raise WrongBookie(
                f"bookie {bookie} ({found.bookie_id!r}, instance {found.instance:016x}) knows that the ledger ids below "
                f"{found.next_ledger_id} were used, and the next ledger would get the id {next_id}: the metadata store was "
                "restored from an older copy, or lost. Restore the newest copy of it: an id that is used twice would mix "
                "two ledgers"
            )

    async def _next_ledger_id(self) -> int:
        return await StoredLedgers(self._store).next_id()


def _check(bookie: str, expected: BookieIdentity, found: BookieIdentity | None) -> BookieIdentity:
    """What the bookie itself should have refused, and who answers without being one."""
    if found is None:
        raise WrongBookie(f"what answers at the address of bookie {bookie} is no bookie: correct the address")
    if not found.cluster and expected.cluster:
        raise WrongBookie(f"bookie {bookie} belongs to no cluster although it was asked to: upgrade it")
    if text := mismatch(expected, found):
        raise WrongBookie(text)
    return found
