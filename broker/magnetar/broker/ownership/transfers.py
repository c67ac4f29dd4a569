"""What the owner of a bundle is asked to do: hand it over, divide it, let go of everything.

A request is a node below /transfers, which is deleted when it is done or impossible: by the owner, or by the broker that
was named as the destination and has the bundle now. A name below /draining-brokers means all bundles of that broker.

A bundle moves like this:

    OWNED   --the node says `to`--> MOVING   topics are closed, some at a time, and the clients of each are sent to the
                                             destination, which may load it at once: its ledger list's compare-and-set
                                             keeps that safe. The next ones follow when it has been loaded
    MOVING  --all are closed: the node is deleted by version--> (nothing)   the destination makes its own node
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Coroutine
from functools import partial
from typing import Any

from magnetar.metadata.store import Create, Delete, Versioned
from magnetar.proto.errors import (
    DataDirectoryError,
    InvalidArgument,
    MagnetarError,
    NotFoundInStore,
    ServiceNotReady,
    TopicNotServed,
    VersionConflict,
)
from magnetar.proto.ids import TopicName
from magnetar.runtime.tasks import LongTask, begin, on_change

from ..log.records import replace, topic_path
from .bundle_ownership import BundleOwnership, Held, State
from .cluster_view import KnownTransfer, put_bounds
from .core.bundles import Bundle, middle, topic_hash
from .ownership import BrokerRow
from .records import (
    DRAINED,
    DRAINING,
    READY,
    STOPPING,
    OwnerRecord,
    owner_path,
    transfer_path,
)

_log = logging.getLogger(__name__)

_RETRY_S, _RETRY_MAX_S = 1.0, 4.0
_TOPICS_AT_ONCE = 16  # on their way to other brokers
# So long a move waits for its destination: whoever asked for it waits for 30 s, and a broker that stops for 5 s.
_PACED_S = 20.0
_PACED_AT_STOP_S = 3.0
_LOADED_WITHIN_S = 0.5  # of these for one topic, whose clients may not come back at once


class Transfers:
    """Of one broker. `start` before use, `close` in the end."""

    def __init__(self, bundles: BundleOwnership) -> None:
        self._bundles = bundles
        self._on_their_way = asyncio.Semaphore(_TOPICS_AT_ONCE)
        # Loop time: no move waits for its destination any longer, when the broker is told to stop.
        self._paced_until = math.inf
        self._follower: LongTask | None = None

    def start(self) -> None:
        """Requests are carried out from now on."""
        look = partial(on_change, self._bundles.look, self._look)
        self._follower = LongTask("the transfers of bundles", look, retry_max_s=_RETRY_MAX_S)

    async def close(self) -> None:
        """No further request is begun. May be called again."""
        if self._follower is not None:
            await self._follower.close()
            self._follower = None

    async def _look(self) -> None:
        """Begins what is asked of the bundles that are owned here."""
        bundles = self._bundles
        if not bundles.valid:
            return
        await bundles.adopt_what_is_ours()
        drained = bundles.name in await bundles.view.draining.get()
        state = READY if not drained else DRAINING if bundles.held else DRAINED
        if bundles.state not in (state, STOPPING):
            bundles.set_state(state)
        asked = await bundles.view.transfers.get()
        for bundle, known in asked.items():
            if bundle not in bundles.held:
                try:
                    await self._look_at_other(bundle, known)
                except DataDirectoryError as error:
                    _log.warning("the request to move bundle %s is left alone: %s", bundle, error)
        for bundle, held in list(bundles.held.items()):
            if held.state is not State.OWNED or held.work is not None:
                continue
            if (request := asked.get(bundle)) is not None:
                self._begin(bundle, held, self._carry_out(bundle, held, request))
            elif drained:
                self._begin(bundle, held, self._drain(bundle, held))

    async def _look_at_other(self, bundle: Bundle, known: KnownTransfer) -> None:
        """A request about a bundle that is not held here: it is to come here once its owner lets go of it, or is no more."""
        view = self._bundles.view
        bounds = await view.bounds(bundle.namespace)
        if not bounds.bounds.has(bundle):  # it was divided, and nobody will carry this out
            await self._finished(bundle, known.version)
        elif not known.record.to:
            # Without an owner there is nothing to do, and whoever asked for it may have died with the owner.
            if await view.owner(bundle) is None:
                await self._finished(bundle, known.version)
        elif known.record.to == self._bundles.name and self._bundles.state == READY:
            if await view.owner(bundle) is None:
                await self._bundles.acquire(bundle, bounds)

    async def _finished(self, bundle: Bundle, version: int) -> None:
        """The request is done, or impossible: it is gone when this returns."""
        while True:
            try:
                await self._bundles.metadata.delete(transfer_path(bundle), version=version)
                return
            except (NotFoundInStore, VersionConflict):  # of an earlier try, or another request by now
                return
            except MagnetarError as error:
                _log.warning("the request to move bundle %s cannot be deleted yet: %s", bundle, error)
                await asyncio.sleep(_RETRY_S)

    def _begin(self, bundle: Bundle, held: Held, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Ends with the session: what is written later by the version of our node might be the next owner's."""
        task = begin(work, f"transfer of bundle {bundle}", lambda done: self._ended(bundle, held, done))
        held.work = task
        return task

    def _ended(self, bundle: Bundle, held: Held, task: asyncio.Task[None]) -> None:
        if held.work is task:
            held.work = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a transfer of bundle %s failed", bundle, exc_info=error)

    async def _carry_out(self, bundle: Bundle, held: Held, known: KnownTransfer) -> None:
        record = known.record
        try:
            if record.split:
                await self._split(bundle, held)
            elif record.to != self._bundles.name:
                await self._move(bundle, held, record.to, record.reason)
                if record.to:
                    return  # whoever gets the bundle says that it is done
        except MagnetarError as error:
            _log.warning("bundle %s stays as it is: %s", bundle, error)
        await self._finished(bundle, known.version)

    async def _drain(self, bundle: Bundle, held: Held) -> None:
        try:
            await self._move(bundle, held, "", "its broker is drained")
        except MagnetarError as error:
            _log.warning("bundle %s of a broker that is drained stays for now: %s", bundle, error)
            asyncio.get_running_loop().call_later(_RETRY_S, self._bundles.look.set)

    # --- moving ------------------------------------------------------------------------------------------------------

    async def _destination(self, bundle: Bundle, to: str) -> BrokerRow:
        brokers = await self._bundles.view.brokers.get()
        name = to or await self._bundles.choose(bundle, excluded=self._bundles.name)
        found = brokers.get(name)
        if found is None or found.state != READY:
            state = "not registered" if found is None else found.state
            raise InvalidArgument(f"bundle {bundle} cannot move to broker {name}, which is {state}")
        return found

    async def _move(self, bundle: Bundle, held: Held, to: str, reason: str) -> None:
        """Returns when the bundle is not owned here any more. Raises when it stays."""
        bundles = self._bundles
        destination = await self._destination(bundle, to)
        _log.info("bundle %s moves from %s to %s: %s", bundle, bundles.name, destination.name, reason)
        await self._announce(bundle, held, destination.name)
        held.to, held.state = destination, State.MOVING
        error = TopicNotServed(f"the topic moves to broker {destination.name}", url=destination.url)
        await self._close_topics(bundle, error, destination)
        await self._delete_node(bundle, held)
        if bundles.held.get(bundle) is held:
            del bundles.held[bundle]
        bundles.view.owners(bundle.namespace).drop()

    async def _close_topics(
        self, bundle: Bundle, error: MagnetarError, destination: BrokerRow | None = None
    ) -> None:
        """Some at a time. For a while, one that has clients counts until `destination` has it, which is its next owner.

        To close a topic is faster than to load it: closed all at once, each would be without an owner until those
        before it are loaded. A destination that is gone loads none, and clients learn of another one only when all are
        closed: nothing waits for it.
        """
        loop, host = asyncio.get_running_loop(), self._bundles.host
        limit = loop.time() + _PACED_S

        async def close(name: TopicName) -> None:
            async with self._on_their_way:
                paced_until = min(limit, self._paced_until)
                if loop.time() < paced_until and host.in_use(name) and await self._loads_topics(destination):
                    await self._close_and_await_owner(name, error, paced_until)
                else:
                    await host.unload(name, error)

        await asyncio.gather(*(close(name) for name in host.loaded() if bundle.holds(name)))

    async def _loads_topics(self, destination: BrokerRow | None) -> bool:
        if destination is None:
            return False
        try:
            found = (await self._bundles.view.brokers.get()).get(destination.name)
        except MagnetarError:  # without the metadata store nobody loads anything
            return False
        return found is not None and found.url == destination.url and found.state != STOPPING

    async def _close_and_await_owner(self, name: TopicName, error: MagnetarError, latest: float) -> None:
        # The ledger list, which every owner changes when it loads the topic (rule 23).
        changed = asyncio.Event()
        watch = self._bundles.metadata.watch(topic_path(name), lambda _: changed.set())
        try:
            await self._bundles.host.unload(name, error)
            changed.clear()  # until now it was changed here
            until = min(latest, asyncio.get_running_loop().time() + _LOADED_WITHIN_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await changed.wait()
        finally:
            watch.close()

    async def _announce(self, bundle: Bundle, held: Held, to: str) -> None:
        """Writes into the bundle's node where it goes. Raises when it stays, and the node does not say so either."""
        bundles = self._bundles
        session_id = bundles.session.session_id
        record = OwnerRecord(bundles.name, bundles.settings.url, to, session_id)
        path = owner_path(bundle)
        try:
            held.version = await replace(bundles.metadata, path, record.encode(), held.version)
            return
        except MagnetarError as error:
            failure = error
        # The answer may have been lost: a node that said `to` for ever would have the destination wait, and serve, for ever.
        _log.warning("whether bundle %s moves to broker %s is not known: %s", bundle, to, failure)
        node = await self._read_for_certain(path, session_id)
        found = None if node is None else OwnerRecord.decode(node.value, path)
        if node is None or found is None or found.session != session_id:
            await self._disown(bundle, "its node was changed by somebody else")
            raise failure
        held.version = node.version
        if found.to != to:
            raise failure

    async def _read_for_certain(self, path: str, session_id: int) -> Versioned | None:
        """Raises ServiceNotReady when the session is over, and the node with it."""
        while self._bundles.session.session_id == session_id:
            try:
                return await self._bundles.metadata.get(path)
            except MagnetarError as error:
                _log.warning("%s cannot be read yet: %s", path, error)
                await asyncio.sleep(_RETRY_S)
        raise ServiceNotReady(f"the session in which {path} was made is over")

    async def _delete_node(self, bundle: Bundle, held: Held) -> None:
        """By its version (rule 31). Returns when it is gone, or its session is over, which deletes it as well."""
        path, session_id = owner_path(bundle), self._bundles.session.session_id
        while True:
            try:
                await self._bundles.metadata.delete(path, version=held.version)
                return
            except (NotFoundInStore, VersionConflict):  # of an earlier try, or not ours any more
                return
            except MagnetarError as error:
                _log.warning("the node of bundle %s cannot be deleted yet: %s", bundle, error)
                await asyncio.sleep(_RETRY_S)
            # If only the answer was lost, the next owner may have a node since, and that may have come to our version.
            try:
                node = await self._read_for_certain(path, session_id)
            except ServiceNotReady:
                return
            if node is None or OwnerRecord.decode(node.value, path).session != session_id:
                return

    async def _disown(self, bundle: Bundle, why: str) -> None:
        """Somebody else has to do with the bundle: whatever is loaded of it is let go."""
        self._bundles.held.pop(bundle, None)
        self._bundles.view.owners(bundle.namespace).drop()
        error = TopicNotServed(f"bundle {bundle} is not served here any more ({why}); look the topic up")
        await self._close_topics(bundle, error)

    async def hand_over(self) -> None:
        """The broker stops: its bundles go to others, all at once, as far as there are others."""
        self._paced_until = asyncio.get_running_loop().time() + _PACED_AT_STOP_S
        await self.close()
        # What arrives waits for another broker, which sees that this one is gone.
        held = self._bundles.held.values()
        works = [one.work for one in held if one.work is not None and one.state is not State.ARRIVING]
        await asyncio.gather(*works, *self._leave(), return_exceptions=True)
        if works:  # something may have been taken or divided meanwhile
            await asyncio.gather(*self._leave(), return_exceptions=True)

    def _leave(self) -> list[asyncio.Task[None]]:
        """Of the broker that stops: moves every bundle with which nothing else is being done."""

        async def move(bundle: Bundle, held: Held) -> None:
            try:
                await self._move(bundle, held, "", "its broker stops")
            except ServiceNotReady:
                pass  # there is no other broker
            except MagnetarError as error:
                _log.warning("bundle %s is not handed over: %s", bundle, error)

        return [
            self._begin(bundle, held, move(bundle, held))
            for bundle, held in self._bundles.held.items()
            if held.state is State.OWNED and held.work is None
        ]

    # --- dividing ----------------------------------------------------------------------------------------------------

    async def _split(self, bundle: Bundle, held: Held) -> None:
        """One commit: no topic notices. Its parts are owned here."""
        bundles = self._bundles
        namespace = bundle.namespace
        known = await bundles.view.bounds(namespace)
        at = middle(bundle, [topic_hash(name) for name in bundles.host.loaded() if bundle.holds(name)])
        bounds = known.bounds.split(bundle, at)
        parts = [bounds.bundle_of(namespace, bundle.first), bounds.bundle_of(namespace, at)]
        session = bundles.session
        record = OwnerRecord(bundles.name, bundles.settings.url, "", session.session_id).encode()
        try:
            await bundles.metadata.commit(
                [
                    put_bounds(namespace, bounds, known.version),
                    Delete(owner_path(bundle), held.version),
                    *(Create(owner_path(part), record, session) for part in parts),
                ]
            )
        except MagnetarError:
            # What became of it is found by reading: now, or after a while.
            asyncio.get_running_loop().call_later(_RETRY_S, bundles.look.set)
            bundles.view.drop(namespace)
            if bundle not in (await bundles.view.owners(namespace).get()):
                bundles.held.pop(bundle, None)
                await bundles.adopt_what_is_ours()
            raise
        del bundles.held[bundle]
        for part in parts:
            bundles.held[part] = Held(State.OWNED)
        bundles.view.drop(namespace)
        _log.info("bundle %s is divided into %s and %s", bundle, *parts)
