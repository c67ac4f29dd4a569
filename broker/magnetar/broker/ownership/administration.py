"""`Administration` of a cluster: what any broker says of it, and asks of the owners of bundles through metadata."""

from __future__ import annotations

import contextlib

from magnetar.metadata import MetadataStore
from magnetar.metadata.store import Check
from magnetar.metadata.watched import Watched
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidArgument,
    MagnetarError,
    NotFound,
    RequestTimeout,
    VersionConflict,
)
from magnetar.runtime.timeouts import TimeLimit

from .cluster_view import NEW, ClusterView, KnownTransfer, put_bounds
from .core.bundles import Bundle, middle, parse_bundle_or_topic, topic_hash
from .draining import Draining, choose
from .ownership import BrokerRow, BundleRow, DrainState
from .records import BALANCER_PATH, READY, OwnerRecord, TransferRecord, owner_path, transfer_path

# What a request to a bundle's owner may take.
_REQUEST_TIMEOUT_S = 30.0


class ClusterAdministration:
    """Over the metadata store, whoever runs."""

    def __init__(self, metadata: MetadataStore, view: ClusterView, draining: Draining) -> None:
        self._metadata = metadata
        self._view = view
        self._draining = draining

    async def brokers(self) -> list[BrokerRow]:
        found = await self._view.brokers.get()
        return [found[name] for name in sorted(found)]

    async def balancer(self) -> str:
        node = await self._metadata.get(BALANCER_PATH)
        return "" if node is None else node.value.decode("utf-8", "replace")

    async def bundles(self, namespace: str) -> list[BundleRow]:
        known = await self._view.bounds(namespace)
        owners = {} if known.version == NEW else await self._view.owners(namespace).get()
        nobody = OwnerRecord("", "", "", 0)
        found = (
            (bundle, owners[bundle].record if bundle in owners else nobody)
            for bundle in known.bounds.bundles(namespace)
        )
        return [BundleRow(str(bundle), owner.broker, owner.url, owner.to) for bundle, owner in found]

    # --- requests ----------------------------------------------------------------------------------------------------

    async def transfer(self, bundle: str, to: str) -> None:
        found = await self._known(bundle)
        if to:
            brokers = await self._view.brokers.get()
            if to not in brokers or brokers[to].state != READY:
                ready = [name for name, row in sorted(brokers.items()) if row.state == READY]
                raise InvalidArgument(
                    f"there is no broker {to} that takes bundles; there are {', '.join(ready)}"
                )
        await self._ask(found, TransferRecord(to, False, "asked for"))
        owner = await self._view.owner(found)
        if to and owner is not None and owner.record.broker != to:
            raise RequestTimeout(
                f"bundle {found} is still at broker {owner.record.broker}, whose log says why; try again"
            )

    async def split(self, bundle: str) -> list[str]:
        found = await self._known(bundle)
        if await self._view.owner(found) is None:
            await self._split_unowned(found)
        else:
            await self._ask(found, TransferRecord("", True, "asked for"))
        self._view.drop(found.namespace)
        known = await self._view.bounds(found.namespace)
        parts = [
            str(part)
            for part in known.bounds.bundles(found.namespace)
            if found.first <= part.first and part.last <= found.last
        ]
        if len(parts) < 2:
            raise RequestTimeout(f"bundle {found} is not divided; try again, or see the log of its owner")
        return parts

    async def _split_unowned(self, bundle: Bundle) -> None:
        """In the middle, unless somebody owns it, or has divided it, by now."""
        known = await self._view.bounds(bundle.namespace)
        bounds = known.bounds.split(bundle, middle(bundle, ()))
        changed = put_bounds(bundle.namespace, bounds, known.version)
        with contextlib.suppress(AlreadyExists, VersionConflict):
            await self._metadata.commit([Check(owner_path(bundle), None), changed])

    async def _known(self, text: str) -> Bundle:
        """A bundle by its name, or the one of a topic. Raises InvalidArgument."""
        named = parse_bundle_or_topic(text)
        namespace = named.namespace if isinstance(named, Bundle) else named.full_namespace
        bounds = (await self._view.bounds(namespace)).bounds
        if not isinstance(named, Bundle):
            return bounds.bundle_of(namespace, topic_hash(named))
        bounds.require(named)
        return named

    async def _ask(self, bundle: Bundle, record: TransferRecord) -> None:
        """Returns when the request is gone: done, or impossible. Without an owner only a destination has anything to do."""
        view = self._view
        transfers = view.transfers
        if not record.to and await view.owner(bundle) is None:
            return
        path = transfer_path(bundle)
        try:
            await self._metadata.create(path, record.encode())
        except AlreadyExists:
            raise RequestTimeout(
                f"the owner of bundle {bundle} is busy with another request; try again"
            ) from None
        transfers.drop()
        late = f"the owner of bundle {bundle} did not answer within {_REQUEST_TIMEOUT_S:g} s"
        try:
            async with TimeLimit(_REQUEST_TIMEOUT_S, lambda: RequestTimeout(late)):
                await _until_gone(transfers, bundle)
        except BaseException:
            await self._withdraw(path)
            raise
        view.drop(bundle.namespace)

    async def _withdraw(self, path: str) -> None:
        try:
            await self._metadata.delete(path)
        except MagnetarError:  # it is gone, or its owner finds it
            return

    async def drain(
        self, name: str = "", *, zone: str = "", kind: str = "", undo: bool = False
    ) -> DrainState:
        draining = self._draining
        chosen = choose(await draining.members(), name, zone=zone, kind=kind)
        await (draining.undo(chosen) if undo else draining.begin(chosen))
        return await draining.state(chosen)

    async def drains(self, name: str = "", *, zone: str = "", kind: str = "") -> DrainState:
        known = await self._draining.members()
        chosen = choose(known, name, zone=zone, kind=kind) if name or zone else known
        drained = [member for member in chosen if member.drained]
        if (name or zone) and not drained:
            raise NotFound(f"{kind} {name} is not drained" if name else f"nothing of zone {zone} is drained")
        return await self._draining.state(drained)


async def _until_gone(transfers: Watched[dict[Bundle, KnownTransfer]], bundle: Bundle) -> None:
    while True:
        changed = transfers.changed
        if bundle not in await transfers.get():
            return
        await changed.wait()
