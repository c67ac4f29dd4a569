"""Who a bookie is: what CONNECT expects it to be, and what CONNECTED says that it is (rule 35).

A ledger client believes a bookie only as the one whose cookie is registered. The *instance* tells a bookie from one on empty
or other disks; the *start* with its random *incarnation* tells the newest state of its disks from an older copy of them:

    registered: start 7, incarnation c            the bookie remembers its starts: ... 5:a 6:b 7:c
    a copy from between 6 and 7, started again:   ... 5:a 6:b 7:d   ->  start 7 was another one: refused
    the bookie itself, started twice since:       ... 6:b 7:c 8:e 9:f  ->  start 7 is known: registered as 9, f

>>> registered = BookieIdentity(instance=10, start=7, incarnation=12)
>>> BookieIdentity(instance=10, start=7, incarnation=13).is_same_start(registered)
False
"""

from __future__ import annotations

import msgspec


class BookieIdentity(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """In CONNECT what the ledger client expects, in CONNECTED what is true. The defaults, "not known", are not compared."""

    # Instance of the metadata store that lists the bookie's ledgers.
    cluster: int = 0
    bookie_id: str = ""
    # Of the bookie's cookie: 64 random bits, made with its data directory.
    instance: int = 0
    # Number of the start, from 1 on, and 64 random bits that only this start has.
    start: int = 0
    incarnation: int = 0
    # The ledger ids from here on were never used, as far as the sender knows: the client by its metadata store, the bookie
    # by all ledgers that it held, and by what clients said before. -1: not known.
    next_ledger_id: int = -1
    # CONNECTED: the bookie takes the place of one that lost its disks, and its operator has said so.
    replaces: bool = False

    def is_same_start(self, other: BookieIdentity) -> bool:
        """Whether the other one is the same process of the same bookie."""
        return (self.instance, self.start, self.incarnation) == (
            other.instance,
            other.start,
            other.incarnation,
        )


NOT_KNOWN = BookieIdentity()


def mismatch(expected: BookieIdentity, found: BookieIdentity) -> str:
    """Why `found` is not the expected bookie, and what to do about it; "": it is. Both sides say it in the same words."""
    who = f"this is bookie {found.bookie_id!r} (instance {found.instance:016x})"
    if expected.cluster and found.cluster and expected.cluster != found.cluster:
        return (
            f"{who} of cluster {found.cluster:016x}, not of {expected.cluster:016x}: correct the list of bookies, "
            "restore the metadata store that this bookie belongs to, or give the new cluster bookies with data directories "
            "of their own"
        )
    other_id = expected.bookie_id and expected.bookie_id != found.bookie_id
    other_instance = expected.instance and expected.instance != found.instance and not found.replaces
    if other_id or other_instance:
        return (
            f"{who}, and the registered one is {expected.bookie_id!r} (instance {expected.instance:016x}): were its disks "
            "emptied, or exchanged with those of another? Mount the right ones, or correct the addresses; if they are lost, "
            "empty the directories and declare it (magnetar bookie cookie --data DIR --accept-new-disk "
            f"{expected.bookie_id})"
        )
    if expected.instance == found.instance and (
        found.start < expected.start
        or (found.start == expected.start and found.incarnation != expected.incarnation)
    ):
        return older_copy(expected, found)
    return ""


def older_copy(expected: BookieIdentity, found: BookieIdentity) -> str:
    """The text of a refusal."""
    return (
        f"this is bookie {found.bookie_id!r} (instance {found.instance:016x}) at start {found.start}, and the registered "
        f"start {expected.start} ({expected.incarnation:016x}) is none of its own: its directories were restored from an "
        "older copy, and lack what it acknowledged since. Mount the right disks; if they are lost, empty the directories "
        f"and declare it (magnetar bookie cookie --data DIR --accept-new-disk {found.bookie_id})"
    )
