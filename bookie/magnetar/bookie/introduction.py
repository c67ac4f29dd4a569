"""The bookie's side of an introduction: who a ledger client expects to meet, and who this bookie is (rules 35 and 36).

    CONNECT names                                   this bookie                           answer
    another cluster, another bookie id                                                    refused
    another instance                                does not replace a lost one           refused: other disks
    a start that the cookie does not have           was restored from an older copy       refused
    fewer ledger ids than the cookie                the store was lost, or is an old one  refused
    its own start                                                                         registered: see `_registered`

What CONNECT leaves open is not compared. The first cluster that names itself is the bookie's for good.
"""

from __future__ import annotations

import logging
from typing import Protocol

from magnetar.proto.bookie_identity import BookieIdentity, mismatch, older_copy
from magnetar.proto.errors import WrongBookie

from .cookie import Cookie
from .ledgers import LedgerDescriptors

_log = logging.getLogger(__name__)


class Introduced(Protocol):
    """The parts of `engine.Bookie` that are needed here."""

    cookie: Cookie
    ledgers: LedgerDescriptors
    # Ids below it were used when this bookie started.
    next_ledger_id_at_start: int

    def change_cookie(self, cookie: Cookie) -> None:
        """Durable when it returns. Blocks for some ms: once in the life of a bookie."""

    def change_cookie_later(self, cookie: Cookie) -> None:
        """Durable some ms later, or, where no space is left, after a later introduction."""


def identity_of(bookie: Introduced) -> BookieIdentity:
    """What CONNECTED says."""
    cookie = bookie.cookie
    return BookieIdentity(
        cookie.cluster,
        cookie.bookie_id,
        cookie.instance,
        cookie.starts,
        cookie.incarnations[-1] if cookie.incarnations else 0,
        bookie.ledgers.next_ledger_id,
        cookie.repairing,
    )


def introduce(bookie: Introduced, expected: BookieIdentity | None) -> BookieIdentity:
    """Who this bookie is. WrongBookie when the peer means another one. May change the cookie: see the module."""
    if expected is not None:
        _check(bookie.cookie, expected, identity_of(bookie))
        if expected.cluster and not bookie.cookie.cluster:
            _log.info(
                "bookie %s belongs to cluster %016x from now on", bookie.cookie.bookie_id, expected.cluster
            )
            bookie.change_cookie(bookie.cookie._replace(cluster=expected.cluster))
        if expected.is_same_start(identity_of(bookie)):
            _registered(bookie, expected)
    return identity_of(bookie)


def _check(cookie: Cookie, expected: BookieIdentity, found: BookieIdentity) -> None:
    if text := mismatch(expected, found):
        raise WrongBookie(text)
    # Of starts that the cookie has forgotten nothing can be said.
    place = len(cookie.incarnations) - 1 - (cookie.starts - expected.start)
    if expected.instance == cookie.instance and expected.start and place >= 0:
        if cookie.incarnations[place] != expected.incarnation:
            raise WrongBookie(older_copy(expected, found))


def _registered(bookie: Introduced, expected: BookieIdentity) -> None:
    """The peer's metadata store has this very start: its ledger ids were read after the start."""
    cookie, ledgers, next_id = bookie.cookie, bookie.ledgers, expected.next_ledger_id
    if next_id < 0:
        return
    # Not by what others said since: they may have drawn ids after this client has asked. It looks for itself.
    if next_id < (used := bookie.next_ledger_id_at_start):
        raise WrongBookie(
            f"this is bookie {cookie.bookie_id!r}, which knows that the ledger ids below {used} were used, and the "
            f"metadata store of the peer would give the id {next_id} to its next ledger: it was restored from an older "
            "copy, or lost. Restore the newest copy of it: an id that is used twice would mix two ledgers"
        )
    # Every later id is that of a ledger which was made while this bookie was there.
    ledgers.complete_from(next_id)
    changed = cookie._replace(repairing=False, next_ledger_id=max(next_id, cookie.next_ledger_id))
    if changed != cookie:
        bookie.change_cookie_later(changed)
    ledgers.next_ledger_id = max(ledgers.next_ledger_id, next_id)
