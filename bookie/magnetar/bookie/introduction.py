"""The bookie's side of an introduction: who a ledger client expects to meet, and who this bookie is (rules 35 and 36).

    CONNECT names                                   this bookie                           answer
    another cluster, another bookie id                                                    refused
    another instance                                does not replace a lost one           refused: other disks
    a start that the cookie does not have           was restored from an older copy       refused
    fewer ledger ids than the cookie                the store was lost, or is an old one  refused
    its own start                                                                         registered: see `_registered`

What CONNECT leaves open is not compared. The first cluster that names itself is the bookie's for good.

`Introductions` owns the cookie of a bookie that runs: introductions are what changes it.
"""

from __future__ import annotations

import asyncio
import logging

from magnetar.proto.bookie_identity import BookieIdentity, mismatch, older_copy
from magnetar.proto.errors import MagnetarError, ServiceNotReady, WrongBookie
from magnetar.runtime.files import Files
from magnetar.runtime.tasks import awaited

from .cookie import Cookie, encode_cookie, write_cookie
from .disk_worker import DiskWorker
from .layout import DataLayout
from .ledgers import LedgerDescriptors

_log = logging.getLogger(__name__)


class Introductions:
    """See the module."""

    def __init__(
        self, files: Files, worker: DiskWorker, layout: DataLayout, cookie: Cookie, ledgers: LedgerDescriptors
    ) -> None:
        # What is to be stored, and what is.
        self.cookie = self._stored = cookie
        # Ids below it were used when this bookie started.
        self.next_ledger_id_at_start = 0
        self._files = files
        self._worker = worker
        self._layout = layout
        self._ledgers = ledgers
        # The last write of the cookie by the disk worker, which does them in order.
        self._written: asyncio.Task[None] | None = None

    def identity(self) -> BookieIdentity:
        """Who this bookie is: what CONNECTED says."""
        cookie = self.cookie
        return BookieIdentity(
            cookie.cluster,
            cookie.bookie_id,
            cookie.instance,
            cookie.starts,
            cookie.incarnations[-1] if cookie.incarnations else 0,
            self._ledgers.next_ledger_id,
            cookie.repairing,
        )

    def introduce(self, expected: BookieIdentity | None) -> BookieIdentity:
        """Who this bookie is. WrongBookie when the peer means another one. May change the cookie: see the module."""
        if expected is not None:
            self._check(expected)
            if expected.cluster and not self.cookie.cluster:
                _log.info(
                    "bookie %s belongs to cluster %016x from now on", self.cookie.bookie_id, expected.cluster
                )
                self.change_cookie(self.cookie._replace(cluster=expected.cluster))
            if expected.is_same_start(self.identity()):
                self._registered(expected.next_ledger_id)
        return self.identity()

    def _check(self, expected: BookieIdentity) -> None:
        cookie, found = self.cookie, self.identity()
        if text := mismatch(expected, found):
            raise WrongBookie(text)
        # Of starts that the cookie has forgotten nothing can be said.
        place = len(cookie.incarnations) - 1 - (cookie.starts - expected.start)
        if expected.instance == cookie.instance and expected.start and place >= 0:
            if cookie.incarnations[place] != expected.incarnation:
                raise WrongBookie(older_copy(expected, found))

    def _registered(self, next_id: int) -> None:
        """The peer's metadata store has this very start: `next_id`, its next ledger id, was read after the start."""
        cookie, ledgers = self.cookie, self._ledgers
        if next_id < 0:
            return
        # Not by what others said since: they may have drawn ids after this client has asked. It looks for itself.
        if next_id < (used := self.next_ledger_id_at_start):
            raise WrongBookie(
                f"this is bookie {cookie.bookie_id!r}, which knows that the ledger ids below {used} were used, and the "
                f"metadata store of the peer would give the id {next_id} to its next ledger: it was restored from an older "
                "copy, or lost. Restore the newest copy of it: an id that is used twice would mix two ledgers"
            )
        # Every later id is that of a ledger which was made while this bookie was there.
        ledgers.complete_from(next_id)
        changed = cookie._replace(repairing=False, next_ledger_id=max(next_id, cookie.next_ledger_id))
        if changed != cookie:
            # Durable some ms later; if that fails, the next introduction tries again.
            self.cookie = changed
            self._written = awaited(self._replace_cookie(changed), "bookie cookie")
        ledgers.next_ledger_id = max(ledgers.next_ledger_id, next_id)

    def change_cookie(self, cookie: Cookie) -> None:
        """Durable when it returns. Blocks for some ms. ServiceNotReady: the disk worker still writes the one before."""
        if self._written is not None and not self._written.done():
            raise ServiceNotReady("this bookie writes its cookie; introduce yourself again")
        self.cookie = self._stored = write_cookie(self._files, self._layout, cookie)

    async def _replace_cookie(self, cookie: Cookie) -> None:
        try:
            await self._worker.replace(self._layout.cookie, encode_cookie(cookie))
        except MagnetarError as error:
            _log.warning("the cookie is not written yet: %s", error)
            if self.cookie is cookie:
                self.cookie = self._stored
        else:
            self._stored = cookie

    async def written(self) -> None:
        """Waits until the cookie is written, or that has failed."""
        if self._written is not None:
            await self._written
