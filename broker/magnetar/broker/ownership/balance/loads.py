"""What this broker reports of itself, and about its bundles: `/bundle-loads/NAME`, ephemeral in its session (FORMATS.md).

Counters become rates between two looks. A report is written when a bundle came or went, or when something changed by a tenth
(`report_change`) of what was written before, and at most every `report_interval_s`.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from magnetar.metadata.record import Record
from magnetar.metadata.store import MAX_VALUE_BYTES, MetadataStore, Session
from magnetar.proto.errors import (
    AlreadyExists,
    MagnetarError,
    NotFoundInStore,
    VersionConflict,
)

from ..core.bundles import HASHES, Bundle, topic_hash
from ..ownership import Host
from ..records import BrokerLoad
from .core.facts import BundleLoad
from .core.survey import weight_of
from .settings import BalanceSettings

_log = logging.getLogger(__name__)

BUNDLE_LOADS_PATH = "/bundle-loads"
# Topics, messages and bytes change by so much at least before it counts: idle bundles are never exactly idle.
_LEAST_CHANGES = (1.0, 1.0, 1.0, 1_000.0, 1_000.0)


class BundleCounters(NamedTuple):
    """Of a bundle that this broker serves: topics that are loaded, and what was counted since it serves the bundle."""

    bundle: str
    topics: int
    messages_in: int
    bytes_in: int
    messages_out: int
    bytes_out: int


class Rates:
    """Counters to rates. A counter that fell belongs to a bundle that went and came back: it began at 0 again."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._before: dict[str, BundleCounters] = {}

    def look(self, counters: Iterable[BundleCounters], now: float) -> list[BundleLoad]:
        """The loads since the last look; of the first one all rates are 0."""
        found = {one.bundle: one for one in counters}
        passed = 0.0 if self._at is None else now - self._at
        before, self._before, self._at = self._before, found, now
        return [self._load(one, before.get(one.bundle), passed) for one in found.values()]

    @staticmethod
    def _load(one: BundleCounters, before: BundleCounters | None, passed_s: float) -> BundleLoad:
        if passed_s <= 0:
            return BundleLoad(one.bundle, one.topics, 0.0, 0.0, 0.0, 0.0)
        if before is None or any(new < old for new, old in zip(one[2:], before[2:])):
            before = BundleCounters(one.bundle, 0, 0, 0, 0, 0)
        return BundleLoad(
            one.bundle,
            one.topics,
            round((one.messages_in - before.messages_in) / passed_s, 1),
            round((one.bytes_in - before.bytes_in) / passed_s, 1),
            round((one.messages_out - before.messages_out) / passed_s, 1),
            round((one.bytes_out - before.bytes_out) / passed_s, 1),
        )


class ServedLoads:
    """What this broker serves, by bundle."""

    def __init__(
        self, host: Callable[[], Host], owned: Callable[[], list[Bundle]], cpu_s: Callable[[], float]
    ) -> None:
        """`cpu_s`: of this process until now, in seconds."""
        self._host = host
        self._owned = owned
        self._cpu_s = cpu_s
        self._rates = Rates()
        self._cpu_before: tuple[float, float] | None = None

    def counters(self) -> Iterable[BundleCounters]:
        """Of all bundles that are served now."""
        bundles = sorted(self._owned())
        sums = [[0, 0, 0, 0, 0] for _ in bundles]
        for topic in self._host().counters():
            # The last bundle that begins at the topic's hash or before: not those of all topics for each bundle.
            at = bisect_right(bundles, (topic.name.full_namespace, topic_hash(topic.name), HASHES)) - 1
            if at >= 0 and bundles[at].holds(topic.name):
                one = sums[at]
                one[0] += 1
                for place, value in enumerate(topic[1:], 1):
                    one[place] += value
        return [BundleCounters(str(bundle), *one) for bundle, one in zip(bundles, sums)]

    def broker_load(self) -> BrokerLoad:
        """Since it was asked for last."""
        now = asyncio.get_running_loop().time()
        counters = list(self.counters())
        rows = self._rates.look(counters, now)
        cpu_s = self._cpu_s()
        before, self._cpu_before = self._cpu_before, (now, cpu_s)
        cpu = 0.0 if before is None or now <= before[0] else (cpu_s - before[1]) / (now - before[0])
        return BrokerLoad(
            cpu=_two_digits(cpu),
            bundles=len(rows),
            topics=sum(row.topics for row in rows),
            connections=int(_two_digits(len(self._host().connections))),
            messages_in=_two_digits(sum(row.messages_in for row in rows)),
            messages_out=_two_digits(sum(row.messages_out for row in rows)),
            bytes_in=_two_digits(sum(row.bytes_in for row in rows)),
            bytes_out=_two_digits(sum(row.bytes_out for row in rows)),
        )


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _figures(load: BundleLoad) -> tuple[float, ...]:
    return load.topics, load.messages_in, load.messages_out, load.bytes_in, load.bytes_out


class LoadReporter:
    """`serve` it under the broker's session; cancelled, it stops, and its node goes with the session."""

    def __init__(
        self,
        store: MetadataStore,
        counters: Callable[[], Iterable[BundleCounters]],
        settings: BalanceSettings,
        rng: random.Random,
        broker: str,
    ) -> None:
        self.written = 0
        self._store = store
        self._counters = counters
        self._settings = settings
        self._rng = rng
        self._path = bundle_loads_path(broker)
        self._version: int | None = None
        self._last: dict[str, BundleLoad] = {}  # as written

    async def serve(self, session: Session) -> None:
        """Until the session is lost. Raises what the store raises, unless it may pass."""
        loop = asyncio.get_running_loop()
        self._forget()
        rates = Rates()
        rates.look(self._counters(), loop.time())
        # A thousand brokers that were started together do not write in the same moment.
        await asyncio.sleep(self._settings.report_interval_s * self._rng.uniform(0.1, 1.0))
        while not session.lost:
            busiest = self._busiest(rates.look(self._counters(), loop.time()))
            if self._version is None or self._changed(busiest):
                await self._write(busiest, session)
            await asyncio.sleep(self._settings.report_interval_s)

    def _forget(self) -> None:
        """The node was of another session."""
        self._version, self._last = None, {}

    def _busiest(self, loads: list[BundleLoad]) -> dict[str, BundleLoad]:
        most = self._settings.max_reported_bundles
        if len(loads) > most:
            loads = heapq.nlargest(most, loads, key=weight_of)
        return {load.bundle: load for load in loads}

    def _changed(self, loads: Mapping[str, BundleLoad]) -> bool:
        if loads.keys() != self._last.keys():
            return True
        share, last = self._settings.report_change, self._last
        for bundle, load in loads.items():
            for (new, old), least in zip(zip(_figures(load), _figures(last[bundle])), _LEAST_CHANGES):
                if abs(new - old) > max(share * old, least):
                    return True
        return False

    async def _write(self, loads: dict[str, BundleLoad], session: Session) -> None:
        value = encode_bundle_loads(list(loads.values()))
        try:
            if self._version is None:
                self._version = await self._store.create(self._path, value, session=session)
            else:
                self._version = await self._store.put(self._path, value, version=self._version)
        except AlreadyExists:
            # Of this broker's former session, which has not ended for the store; or a write whose answer was lost.
            await self._remove_former(session)
            return
        except (NotFoundInStore, VersionConflict):
            self._version = None
            return
        except MagnetarError as error:
            if not error.retryable or session.lost:
                raise
            _log.warning("the loads of the bundles are reported again in a moment: %s", error)
            self._version = None
            return
        self._last = loads
        self.written += 1

    async def _remove_former(self, session: Session) -> None:
        """Deletes a node of this name, so that the next report makes it in this session."""
        try:
            node = await self._store.get(self._path)
            if node is not None and not session.lost:
                await self._store.delete(self._path, version=node.version)
        except (NotFoundInStore, VersionConflict):
            pass
        except MagnetarError as error:
            if not error.retryable:
                raise
            _log.warning("a former report of the bundles' loads stays for now: %s", error)


class _BundleLoads(Record):
    bundles: list[BundleLoad]


def bundle_loads_path(broker: str) -> str:
    """Of a broker's node."""
    return f"{BUNDLE_LOADS_PATH}/{broker}"


def encode_bundle_loads(rows: Sequence[BundleLoad]) -> bytes:
    """The value; with very long names, of the first rows that fit into a node."""
    rows = list(rows)
    while len(value := _BundleLoads(rows).encode()) > MAX_VALUE_BYTES:
        rows = rows[: len(rows) // 2]
    return value


def decode_bundle_loads(value: bytes, path: str) -> list[BundleLoad]:
    """The rows. Raises DataDirectoryError."""
    return _BundleLoads.decode(value, path).bundles
