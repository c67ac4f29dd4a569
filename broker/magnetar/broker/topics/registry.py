"""The topics of this process: loaded once however many ask, made when first used, listed, deleted, closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from magnetar.metadata import MetadataStore
from magnetar.proto.errors import (
    InvalidArgument,
    InvalidTopicName,
    MagnetarError,
    TopicBusy,
    TopicNotFound,
    TopicNotServed,
    Unsupported,
)
from magnetar.proto.ids import TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.tasks import LongTask, awaited, begin

from ..dispatch.core.entry_source import DispatchCounters
from ..export.orphans import find_staged
from ..log.archives import ArchiveReader, NoArchives
from ..log.records import TOPICS_ROOT, TopicRecord, topic_path
from ..log.shared_reads import SharedReads
from ..log.tail_cache import TailCache
from ..ownership.ownership import Ownership, SoleBroker, TopicCounters
from ..resources.budget import ByteBudget
from ..resources.stores import Bookies, Ledgers
from ..resources.tasks import Jobs
from ..settings import BrokerSettings
from .components import Components, PublishCounters
from .policies import NamespacePolicies
from .topic import Topic
from .watches import TopicWatches

_log = logging.getLogger(__name__)

_READ_AHEAD_SHARE = 0.2  # of the memory budget: entries read for consumers that are behind
_LOADS_AT_ONCE = 64
_UNLOADS_AT_ONCE = 16
_LOOK_S = 2.0
_MAX_PROBLEMS = 20  # that a broker names
_TOPICS_PER_TURN = 50  # of maintenance: a millisecond of the loop
# Whoever asks again so soon for a topic that could not be loaded gets the same failure: a storm of clients does not make
# one load after another.
_FAILURE_MEMORY_S = 0.1


class _Load(NamedTuple):
    name: TopicName
    task: asyncio.Task[Topic]
    create: bool


class Broker:
    """See the module docstring. `start` before use, `close` in the end."""

    def __init__(
        self,
        metadata: MetadataStore,
        ledgers: Ledgers,
        settings: BrokerSettings,
        clock: Clock,
        bookies: Bookies | None = None,
        archives: ArchiveReader | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        """`bookies`: where they listen, for clients that go there themselves. `archives`: reads archived ledgers.

        `ownership`: which topics are served here; without it all are. It is the broker's, which starts and closes it.
        """
        self.settings = settings
        self.ownership: Ownership = ownership or SoleBroker(settings.name, settings.service_url)
        self._metadata = metadata
        self.ledgers = ledgers
        self.cache = TailCache(settings.tail_cache_bytes)
        self._shared_reads = SharedReads(settings.shared_read_bytes)
        self.publish_budget = ByteBudget(settings.publish_bytes)
        self._read_budget = ByteBudget(int(settings.memory_budget_bytes * _READ_AHEAD_SHARE))
        self.published = PublishCounters()
        self.dispatched = DispatchCounters()
        self.namespaces = NamespacePolicies(metadata)
        self._components = Components(
            metadata, ledgers, settings, clock, self.cache, self._shared_reads, self.publish_budget,
            self._read_budget, self.published, self.dispatched, archives or NoArchives(), self.namespaces, bookies,
            asyncio.Semaphore(settings.max_compactions), self.ownership,
        )  # fmt: skip
        self.topics: dict[str, Topic] = {}
        self.connections: dict[object, None] = {}  # of clients: each listener notes those that are ready
        self.watches = TopicWatches(None if self.ownership.alone else metadata)
        self._loading: dict[str, _Load] = {}
        self._failed_loads: dict[str, MagnetarError] = {}  # of the last moment
        # By topic that is being deleted or unloaded, or that fenced itself and lets go: whoever asks for it waits.
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._closing_topics: dict[str, Topic] = {}  # those of `_ending` that are not deleted
        self._load_slots = asyncio.Semaphore(_LOADS_AT_ONCE)
        self._rounds: list[LongTask] = []
        self._jobs = Jobs("broker")
        self._name_prefix = ""
        self._names = 0
        self._closing = False
        self._problems: dict[str, str] = {}

    async def start(self) -> None:
        """Claims a prefix for generated names and begins the maintenance rounds."""
        number = await self._metadata.next_id("broker-starts")
        self._name_prefix = f"{self.settings.name}-{number}"
        await self.ownership.start(self)
        self._rounds = [
            LongTask("the maintenance of topics", self._maintain),
            LongTask("the expiry of messages", self._expire),
            LongTask("the look for problems", self._follow_problems),
        ]

    def generate_name(self) -> str:
        """A producer or consumer name that was never given before."""
        self._names += 1
        return f"{self._name_prefix}-{self._names}"

    # --- topics ------------------------------------------------------------------------------------------------------

    async def topic(self, name: TopicName, *, create: bool) -> Topic:
        """The loaded topic. Concurrent calls share one load, and its failure if it fails.

        Raises TopicNotFound, TopicBusy, Unsupported, or what the load met.
        """
        key = str(name)
        if not self.has(name) and not self.ownership.serves(name):
            if create:
                await self.ownership.claim(name)
            elif not await self.exists(name):
                raise TopicNotFound(f"topic {name} does not exist")
        while True:
            if key in self._ending:
                await asyncio.wait([self._ending[key]])
                continue
            topic = self.topics.get(key)
            if topic is not None:
                topic.used_at = asyncio.get_running_loop().time()
                return topic
            if self._closing:
                raise TopicNotServed("the broker is stopping; look the topic up again")
            if name.domain != "persistent":
                raise Unsupported("non-persistent topics are not offered yet; use persistent://...")
            if (error := self._failed_loads.get(key)) is not None:
                raise _copy_of(error)
            load = self._loading.get(key)
            if load is None:
                self.ownership.check(name)
                # Whoever waits has the failure; nobody does when all of them have given up.
                loading = self._load(name, create=create)
                task = begin(
                    loading, f"load of topic {name}", lambda done: done.cancelled() or done.exception()
                )
                load = self._loading[key] = _Load(name, task, create)
            try:
                # Shielded: a caller who gives up does not stop the load for the others.
                return await asyncio.shield(load.task)
            except TopicNotFound as failure:
                if load.create or not create:
                    raise _copy_of(failure) from None
            except MagnetarError as failure:
                raise _copy_of(failure) from None

    async def _load(self, name: TopicName, *, create: bool) -> Topic:
        key = str(name)
        try:
            async with self._load_slots:
                topic = Topic(name, self._components, self._fenced)
                try:
                    made = await topic.load(create=create)
                    self.ownership.check(name)  # it may have moved meanwhile
                except BaseException:
                    await topic.abandon()
                    raise
                self.topics[key] = topic
                if made:
                    self.watches.changed(name, exists=True)
                return topic
        except TopicNotFound:  # it may be made in the next moment, and to find that out costs one look
            raise
        except MagnetarError as error:
            self._failed_loads[key] = error
            asyncio.get_running_loop().call_later(_FAILURE_MEMORY_S, self._failed_loads.pop, key, None)
            raise
        finally:
            del self._loading[key]

    def _fenced(self, topic: Topic) -> None:
        """A topic fenced itself: the next call loads it anew, once it has let go."""
        if self.topics.get(str(topic.name)) is topic:
            self._begin_closing(topic)

    # --- for ownership: see Host -------------------------------------------------------------------------------------

    def problems(self) -> dict[str, str]:
        """See Host; also for /health. As of a few seconds ago."""
        return self._problems

    async def look_for_problems(self) -> None:
        """Looks at every topic, in turns of the loop."""
        found = {
            f"bookie {bookie}": "it failed a moment ago: reads and adds go elsewhere"
            for bookie in self.ledgers.suspects()
        }
        bookies = self._components.bookies
        if bookies is not None and (lack := self.settings.lack_of_bookies(len(bookies.writable()))):
            found["bookies"] = lack
        degraded = 0

        def look(topic: Topic) -> None:
            nonlocal degraded
            degraded += topic.degraded
            for name, subscription in topic.subscriptions.items():
                if len(found) < _MAX_PROBLEMS and (trouble := subscription.trouble()):
                    found[f"subscription {name} of {topic.name}"] = trouble

        await self._for_all_topics("problems", look)
        if degraded:
            found["topics"] = (
                f"{degraded} of them write fewer copies than their policy says: too few bookies are there"
            )
        self._problems = found

    def loaded(self) -> list[TopicName]:
        """Those that are being closed, loaded, or being loaded; whoever uses one last comes last."""
        topics = sorted(self.topics.values(), key=lambda topic: topic.used_at)
        closing = [TopicName.parse(key) for key in self._ending if key not in self.topics]
        return closing + [topic.name for topic in topics] + [load.name for load in self._loading.values()]

    def has(self, name: TopicName) -> bool:
        """True for one of `loaded`."""
        key = str(name)
        return key in self.topics or key in self._loading or key in self._ending

    def in_use(self, name: TopicName) -> bool:
        """True for a topic with clients, or with work under way."""
        topic = self.topics.get(str(name))
        return topic is not None and topic.in_use

    def counters(self) -> list[TopicCounters]:
        """Of all topics that are loaded."""
        return [
            TopicCounters(
                topic.name,
                topic.messages_in,
                topic.bytes_in,
                topic.dispatched.messages_out,
                topic.dispatched.bytes_out,
            )
            for topic in self.topics.values()
        ]

    async def unload(self, name: TopicName, error: MagnetarError) -> None:
        """Closes a topic: what is queued is confirmed, its users get `error`. Returns when nothing of it is left."""
        key = str(name)
        if (load := self._loading.get(key)) is not None:
            await asyncio.wait([load.task])
        # One that is being deleted or unloaded ends by that.
        if key not in self._ending and (topic := self.topics.get(key)) is not None:
            self._begin_closing(topic, error)
        if (ending := self._ending.get(key)) is not None:
            await asyncio.wait([ending])

    def fence(self, error: MagnetarError) -> None:
        """Nothing of any topic is confirmed any more when this returns; they let go afterwards."""
        for topic in [*self.topics.values(), *self._closing_topics.values()]:
            topic.fence(error)

    def serves(self, name: TopicName) -> bool:
        """True if the topic may be loaded here now."""
        return self.ownership.serves(name)

    # --- what there is -----------------------------------------------------------------------------------------------

    async def exists(self, name: TopicName) -> bool:
        """True if the topic is loaded or recorded."""
        if str(name) in self.topics:
            return True
        stored = await self._metadata.get(topic_path(name))
        return stored is not None and not TopicRecord.decode(stored.value, topic_path(name)).deleting

    async def list_topics(self, namespace: str, *, after: str = "", count: int) -> list[str]:
        """At most `count` full names behind `after`, ordered by tenant, namespace, domain and name.

        `namespace`: `tenant/namespace`, or all if empty. A node whose name no topic can have is left out.
        """
        parts = namespace.split("/") if namespace else []
        if namespace and (len(parts) != 2 or not all(parts)):
            raise InvalidArgument(f"not a namespace: {namespace!r} (want tenant/namespace)")
        behind: list[str] = []
        if after:
            domain, tenant, its_namespace, name = TopicName.parse(after)
            behind = [tenant, its_namespace, domain, name][len(parts) :]
        root = "/".join([TOPICS_ROOT, *parts])
        names: list[str] = []
        more = True
        while more and len(names) < count:
            wanted = count - len(names)
            paths = await self._list(root, 4 - len(parts), behind, wanted)
            for path in paths:
                tenant, space, domain, name = path.removeprefix(f"{TOPICS_ROOT}/").split("/")
                try:
                    names.append(str(TopicName.parse(f"{domain}://{tenant}/{space}/{name}")))
                except InvalidTopicName as error:
                    _log.warning("%s is left out of the list of topics: %s", path, error)
            if more := len(paths) == wanted:
                behind = paths[-1].removeprefix(f"{root}/").split("/")
        return names

    async def _list(self, path: str, levels: int, after: list[str], count: int) -> list[str]:
        """At most `count` nodes that stand `levels` below a path, behind the one whose names below it are `after`."""
        first = after[0] if after else ""
        if levels == 1:
            return [
                f"{path}/{name}" for name in await self._metadata.children(path, after=first, limit=count)
            ]
        found = await self._list(f"{path}/{first}", levels - 1, after[1:], count) if first else []
        for name in await self._metadata.children(path, after=first):
            if len(found) == count:
                break
            found += await self._list(f"{path}/{name}", levels - 1, [], count - len(found))
        return found

    async def delete_topic(self, name: TopicName, *, force: bool) -> None:
        """Deletes it with its subscriptions and ledgers. Raises TopicNotFound, TopicInUse."""
        topic = await self.topic(name, create=False)
        if not force:
            await topic.probe_users()
        key = str(name)
        if key in self._ending:
            raise TopicBusy(f"topic {name} is being deleted; try again")

        async def delete() -> None:
            try:
                await topic.delete(force=force)
                self.watches.changed(name, exists=False)
            finally:
                if self._ending.get(key) is asyncio.current_task():  # else it fenced itself just before
                    del self._ending[key]
                if topic.not_served is not None and self.topics.get(key) is topic:
                    del self.topics[key]

        # A task of its own: it goes on when the caller gives up.
        self._ending[key] = awaited(delete(), f"deletion of topic {name}")
        await asyncio.shield(self._ending[key])

    async def find(self, name: TopicName) -> Topic:
        """For producing and consuming: the topic, made if settings allow it. Raises TopicNotFound."""
        return await self.topic(name, create=self.settings.auto_create_topics)

    async def known(self, name: TopicName) -> Topic:
        """For administration: the topic if it exists. Raises TopicNotFound."""
        if not await self.exists(name):
            raise TopicNotFound(f"topic {name} does not exist")
        return await self.topic(name, create=False)

    # --- maintenance, end ---------------------------------------------------------------------------------------------

    async def _maintain(self) -> None:
        loop = asyncio.get_running_loop()
        look_at = loop.time()  # when to look for staged ledgers of topics that are not loaded
        while True:
            await asyncio.sleep(self.settings.maintenance_interval_s)
            # Both may have to wait, for topics that cannot be loaded or for bookies; the rounds do not.
            if loop.time() >= look_at:
                look_at = loop.time() + self.settings.staged_ttl_ms / 1000
                self._jobs.begin("looking for staged ledgers", lambda: find_staged(self, self._metadata))
            if idle := await self._round():
                self._jobs.begin("unloading idle topics", partial(self._unload, idle))

    async def _round(self) -> list[Topic]:
        """Every topic has its round. Returns those that nobody uses."""
        idle: list[Topic] = []

        def maintain(topic: Topic) -> None:
            topic.maintain()
            if self._is_idle(topic):
                idle.append(topic)

        await self._for_all_topics("maintenance", maintain)
        return idle

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self.settings.message_expiry_interval_s)
            await self._for_all_topics("expiry", Topic.expire)

    async def _follow_problems(self) -> None:
        while True:
            await self.look_for_problems()
            await asyncio.sleep(_LOOK_S)

    async def _for_all_topics(self, what: str, visit: Callable[[Topic], None]) -> None:
        """Those that are loaded, in turns of the loop."""
        for number, topic in enumerate(list(self.topics.values()), 1):
            try:
                visit(topic)
            except Exception:  # a defect in one topic must not end the rounds of all
                _log.exception("the round of %s of topic %s failed", what, topic.name)
            if number % _TOPICS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _is_idle(self, topic: Topic) -> bool:
        limit_ms = self.settings.topic_idle_unload_ms
        idle_ms = 1000 * (asyncio.get_running_loop().time() - topic.used_at)
        if not 0 < limit_ms <= idle_ms or topic.in_use or topic.not_served is not None:
            return False
        return not topic.maintenance.waits_for_time

    async def _unload(self, idle: list[Topic]) -> None:
        for first in range(0, len(idle), _UNLOADS_AT_ONCE):
            for topic in filter(self._is_idle, idle[first : first + _UNLOADS_AT_ONCE]):
                self._begin_closing(topic)
            if self._ending:
                await asyncio.wait(list(self._ending.values()))

    def _begin_closing(
        self, topic: Topic, error: MagnetarError | None = None, drain_seconds: float = 5.0
    ) -> None:
        """`_ending` has the task; until its end the topic is one of those that `fence` reaches."""
        key = str(topic.name)
        del self.topics[key]
        self._closing_topics[key] = topic
        self._ending[key] = begin(self._close(topic, error, drain_seconds), f"close of topic {key}")

    async def _close(self, topic: Topic, error: MagnetarError | None, drain_seconds: float) -> None:
        try:
            await topic.close(error, drain_seconds=drain_seconds)
        except Exception:  # a defect in one topic must not keep the others loaded
            _log.exception("closing topic %s failed", topic.name)
        finally:
            del self._closing_topics[str(topic.name)], self._ending[str(topic.name)]

    async def close(self, *, drain_seconds: float = 5.0) -> None:
        """Closes every topic: queued messages are confirmed, cursors written, ledgers closed; others get what they can."""
        await self._hand_over(drain_seconds)
        self._closing = True
        for rounds in self._rounds:
            await rounds.close()
        await self._jobs.cancel()
        await self.namespaces.close()
        self.watches.close()
        if busy := [load.task for load in self._loading.values()] + list(self._ending.values()):
            await asyncio.wait(busy)
        for topic in list(self.topics.values()):
            self._begin_closing(topic, drain_seconds=drain_seconds)
        if self._ending:
            await asyncio.wait(list(self._ending.values()))
        await self.ownership.close()

    async def _hand_over(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.ownership.hand_over()
        except TimeoutError:
            _log.warning("not all topics could be handed over to other brokers within %g s", seconds)
        except Exception:  # whatever it is, the topics are closed here
            _log.exception("the topics could not be handed over to other brokers")

    def figures(self) -> dict[str, float]:
        """Counters and gauges of the broker, for /metrics; all are counted per run, entry or delivery, never per message."""
        return {
            "topics": len(self.topics),
            "connections": len(self.connections),
            "degraded_topics": sum(topic.degraded for topic in self.topics.values()),
            "messages_in_total": self.published.messages_in,
            "bytes_in_total": self.published.bytes_in,
            "entries_in_total": self.published.entries_in,
            "send_runs_total": self.published.runs_in,
            "attached_ledgers_total": self.published.attached_ledgers,
            "attached_messages_total": self.published.attached_messages,
            "published_batches_total": self.published.published_batches,
            "messages_out_total": self.dispatched.messages_out,
            "bytes_out_total": self.dispatched.bytes_out,
            "deliveries_total": self.dispatched.deliveries,
            "entry_reads_total": self.dispatched.reads,
            "entry_read_bytes_total": self.dispatched.read_bytes,
            "unreadable_entries": self.dispatched.unreadable_entries,
            "skipped_entries_total": self.dispatched.skipped_entries,
            "dispatch_failures_total": self.dispatched.failures,
            "publish_queue_bytes": self.publish_budget.used,
            "tail_cache_bytes": self.cache.used,
            "tail_cache_entries": len(self.cache),
            "read_ahead_bytes": self._read_budget.used,
            "shared_read_bytes": self._shared_reads.used,
            "shared_reads_total": self._shared_reads.joined,
            "ledger_read_bytes_total": self._shared_reads.fetched_bytes,
            **self._components.ledgers.figures(),
            **self._components.archives.figures(),
            **self.ownership.figures(),
        }


def _copy_of(error: MagnetarError) -> MagnetarError:
    """For each who waited: raising an error adds a traceback to it."""
    return type(error)(error.message, **error.details)
