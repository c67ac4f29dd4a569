"""A bookie of this process and the metadata store that lists its ledgers: do they belong together (rules 9, 35, 36)?

It is introduced as one over TCP is, before it serves anybody. A bookie that took the place of one that lost its disks says
so in its cookie: then every ledger that there was before is fenced and unknown there, so that nothing is said not to exist.
"""

from __future__ import annotations

from magnetar.bookie import Bookie, BookieSettings
from magnetar.bookie.layout import DataLayout
from magnetar.ledger import StoredIdentities
from magnetar.ledger.identities import MOST_INTRODUCTIONS
from magnetar.metadata import MetadataStore
from magnetar.proto.errors import WrongBookie
from magnetar.runtime.files import Files


async def refuse_emptied(
    files: Files, settings: BookieSettings, metadata: MetadataStore, cluster: int
) -> None:
    """WrongBookie where a bookie that is registered would be made anew in an empty directory. Nothing is made there.

    Only a bookie that was given its name can be known before it has a cookie.
    """
    name, directory = settings.bookie_id, settings.data_directory
    if not name or files.exists(DataLayout.at(directory).cookie):
        return
    known = await StoredIdentities(metadata, cluster).expected(name)
    if known.instance:
        data, _, last = directory.rpartition("/")
        where = f"--data {data}" if last == "bookie" else f"--set bookie.data_directory={directory}"
        raise WrongBookie(
            f"{directory} holds no bookie, and {name!r} is registered (instance {known.instance:016x}): were its disks "
            "emptied, or are they not mounted? Mount them; if they are lost, declare it (magnetar bookie cookie "
            f"{where} --accept-new-disk {name}) and start it again: its ledgers are repaired from their other copies"
        )


async def introduce_bookie(bookie: Bookie, metadata: MetadataStore, cluster: int) -> StoredIdentities:
    """Who it is, for others. WrongBookie when it is known with another data directory, or a newer state of it."""
    identities = StoredIdentities(metadata, cluster)
    name = bookie.cookie.bookie_id
    for _ in range(MOST_INTRODUCTIONS):
        expected = await identities.expected(name)
        if await identities.verify(name, expected, bookie.introduce(expected)):
            break
    return identities
