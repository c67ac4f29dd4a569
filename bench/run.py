"""Rounds of all workloads, interleaved: a slow minute of the machine hits every figure, and the medians of none."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.probes import Others, PacedProbe, calibrate, disk_probes, ring_probe, settle, socket_probe
from bench.relay import count_sends
from bench.service_process import ServiceProcess
from bench.services import drop_page_cache, resident_megabytes, run_apart, run_client, running
from bench.stalls import describe

Say = Callable[[str], None]

# For (f): caches so small that a backlog of four times their size is read in seconds.
SMALL_CACHES = {
    "bookie.write_cache_bytes": 16 << 20,
    "bookie.max_entry_bytes": 6 << 20,  # a half of the write cache holds one
    "bookie.read_cache_bytes": 16 << 20,
    "broker.memory_budget_bytes": 64 << 20,
}
SMALL_CACHE_BYTES = (16 << 20) + (16 << 20) + int((64 << 20) * 0.2)
QUIET = ("--log-level", "warning")
WRITING = "abcde"  # workloads whose journal groups are worth a probe
MIN_COLD_SHARE = 0.8  # of the payload must come from the disk, or (f) measured a cache


class Sizes:
    """Messages of each workload; a quick run does a quarter."""

    def __init__(self, quick: bool) -> None:
        part = 4 if quick else 1

        def whole(messages: int) -> int:
            """Whole batches only: the tail waits for exactly as many as are sent."""
            return -(-messages // part // 1000) * 1000

        self.a = whole(1_200_000)
        self.b = whole(3_000_000)
        self.b_apart = whole(4_000_000)
        self.c = whole(700_000)
        self.d = 2_000
        self.e_seconds = 3.0 / (2 if quick else 1)
        # At least four times the caches, whatever the rest.
        self.f_batched = max(whole(2_500_000), SMALL_CACHE_BYTES * 4 // 100 // 1000 * 1000 + 1000)
        self.f_unbatched = max(1_500_000 // part, SMALL_CACHE_BYTES * 4 // 148 + 1000)
        self.g_batched = whole(1_500_000)
        self.g_unbatched = whole(600_000)
        self.probe_s = 1.0 / (2 if quick else 1)


class Round:
    """One round; every workload has a service and a directory of its own, so that none pays for what another left behind.

    `figures` by the names of bench.limits, `details` for the JSON file.
    """

    def __init__(
        self,
        directory: Path,
        sizes: Sizes,
        wanted: Collection[str],
        settle_s: float,
        say: Say,
        *,
        limits: bool = True,
    ) -> None:
        """`settle_s`: how long to wait for a quiet machine before each workload; `limits`: measure the machine's, too."""
        self.directory = directory
        self.settle_s = settle_s
        self.sizes = sizes
        self.wanted = wanted
        self.say = say
        self.limits = limits
        self.figures: dict[str, float] = {}
        self.details: dict[str, Any] = {}
        self.probes: dict[str, Any] = {}
        # Before each workload.
        self.idle_shares: list[float] = []
        self.calibrations_ms: list[float] = []
        # The share of all cores that others used during each workload; the highest, where one has several parts.
        self.others: dict[str, float] = {}
        # Bytes of a journal group by workload, as seen.
        self.groups: dict[str, int] = {}

    def run(self) -> None:
        """Everything that is wanted."""
        self.directory.mkdir(parents=True)
        try:
            for letter, workload in (
                ("h", self._start_up),
                ("d", self._synchronous),
                ("e", self._end_to_end),
                ("a", self._unbatched),
                ("b", self._batched),
                ("b", self._apart),
                ("c", self._kilobytes),
                ("g", self._acknowledge),
                ("f", self._catch_up),
                ("i", self._keyed),
                ("a", self._tcp_bookie),
            ):
                if letter in self.wanted:
                    self.idle_shares.append(settle(self.settle_s))
                    self.calibrations_ms.append(calibrate())
                    others = Others()
                    workload()
                    self.others[letter] = max(others.share(), self.others.get(letter, 0.0))
            if self.limits:
                self.probes["socket"] = socket_probe(self.sizes.probe_s, 2000)
                self.probes["disk"] = disk_probes(self.directory, self.groups, self.sizes.probe_s / 2)
            self.details["others"] = self.others
            self.details["probes"] = self.probes
            self.details["idle_shares"] = self.idle_shares
            self.details["calibrations_ms"] = self.calibrations_ms
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _note(self, name: str, result: dict[str, Any], value: float) -> None:
        self.figures[name] = value
        self.details[name] = result
        if "group_bytes" in result and name[0] in WRITING:
            self.groups.setdefault(name.partition("_")[0], result["group_bytes"])
        self.say(f"    {name:<12} {value:>14,.2f}")

    @contextlib.contextmanager
    def _service(self, arguments: Sequence[str] = ()) -> Iterator[list[ServiceProcess]]:
        data = self.directory / "data"
        try:
            with running(ServiceProcess(data, arguments=[*QUIET, *arguments])) as services:
                yield services
        finally:
            shutil.rmtree(data, ignore_errors=True)

    def _start_up(self) -> None:
        with self._service() as (service,):
            self._note("h_start", {}, service.ready_after_s)
            resident = resident_megabytes(service)
            self._note("h_idle", {"resident_mb": resident}, sum(resident.values()))

    def _synchronous(self) -> None:
        probe = self.probes["ring"] = ring_probe(self.directory, self.sizes.d)
        with self._service() as services:
            result = run_client(services, "synchronous", "d", messages=self.sizes.d, size=100)
        self._note("d_p50", result, result["p50"])
        for name, value in (
            ("ratio", result["p50"] / probe["p50"]),
            ("p99", result["p99"]),
            ("p999", result["p999"]),
        ):
            self._note(f"d_{name}", {}, value)

    def _end_to_end(self) -> None:
        if "ring" not in self.probes:
            self.probes["ring"] = ring_probe(self.directory, self.sizes.d)
        with PacedProbe(self.directory, windowed=False) as alone:
            time.sleep(self.sizes.e_seconds)
        # Half of the time the probe writes as well.
        with (
            PacedProbe(self.directory, windowed=True) as beside,
            self._service() as services,
        ):
            result = run_client(
                services, "end_to_end", "e", rate=10_000, seconds=2 * self.sizes.e_seconds, size=100
            )
        found = describe(result.pop("samples"), alone.samples, beside.samples)
        pace = {
            "service": (
                result.get("groups", 0) * result["rate"] / result["messages"],
                result.get("group_bytes", 0),
            ),
            "probe": (alone.groups / self.sizes.e_seconds, alone.bytes / max(1, alone.groups)),
        }
        self._note("e_p50", result | {"conditions": found, "pace": pace}, found["service"]["p50"])
        for percentile in ("p99", "p999"):
            self._note(f"e_{percentile}", {}, found["service"][percentile])
        for part, source in (("steady", "service steady"), ("added", "added")):
            for percentile in ("p50", "p99", "p999"):
                if source in found:
                    self._note(f"e_{part}_{percentile}", {}, found[source][percentile])

    def _unbatched(self) -> None:
        with self._service() as services:
            result = run_client(services, "unbatched", "a", messages=self.sizes.a, size=100)
            resident = resident_megabytes(services[0])
        self._note("a", result, result["rate"])
        self._note("a_loaded", {"resident_mb": resident}, sum(resident.values()))

    def _batched(self) -> None:
        with self._service() as services:
            result = run_client(services, "batched", "b", messages=self.sizes.b, size=100, batch=1000)
        self._note("b", result, result["rate"])

    def _apart(self) -> None:
        with self._service() as services:
            result = run_apart(services, "b", messages=self.sizes.b_apart, size=100, batch=1000)
        self._note("b_apart", result, result["rate"])

    def _kilobytes(self) -> None:
        with self._service() as services:
            result = run_client(services, "batched", "c", messages=self.sizes.c, size=1024, batch=100)
        self._note("c", result, result["rate"])

    def _acknowledge(self) -> None:
        for name, messages, batch in (
            ("g_batched", self.sizes.g_batched, 1000),
            ("g_unbatched", self.sizes.g_unbatched, 1),
        ):
            with self._service() as services:
                run_client(services, "fill", name, messages=messages, size=100, batch=batch)
                result = run_client(services, "acknowledge", name, messages=messages)
            self._note(name, result, result["rate"])

    def _keyed(self) -> None:
        for name, workload, messages, batch in (
            ("i_unbatched", "unbatched", self.sizes.a, {}),
            ("i_batched", "batched", self.sizes.b, {"batch": 1000}),
        ):
            results = []
            for keyed in (False, True):
                with self._service() as services:
                    results.append(
                        run_client(
                            services, workload, name, messages=messages, size=100, keyed=keyed, **batch
                        )
                    )
            plain, with_keys = results
            self._note(name, with_keys, with_keys["rate"])
            self._note(f"{name}_share", {}, with_keys["rate"] / plain["rate"])

    def _catch_up(self) -> None:
        settings = [part for name, value in SMALL_CACHES.items() for part in ("--set", f"{name}={value}")]
        for name, messages, batch in (
            ("f_batched", self.sizes.f_batched, 1000),
            ("f_unbatched", self.sizes.f_unbatched, 1),
        ):
            data = self.directory / "cold"
            service = ServiceProcess(data, arguments=[*QUIET, *settings])
            with running(service) as services:
                run_client(services, "fill", name, messages=messages, size=100, batch=batch)
            drop_page_cache(data)
            with running(service) as services:
                result = run_client(services, "catch_up", name, messages=messages)
            shutil.rmtree(data)
            if result["read_bytes"] < MIN_COLD_SHARE * result["payload_bytes"]:
                raise SystemExit(
                    f"bench: (f) read only {result['read_bytes']:,} bytes from the disk for "
                    f"{result['payload_bytes']:,} of payload: the page cache was not cold"
                )
            self._note(name, result, result["rate"])

    def _tcp_bookie(self) -> None:
        bookie = ServiceProcess(self.directory / "tcp-bookie", command="bookie", arguments=QUIET)
        with running(bookie):
            address = f"127.0.0.1:{bookie.ports['bookie']}"
            broker = ServiceProcess(
                self.directory / "tcp-broker", command="broker", arguments=[*QUIET, "--bookies", address]
            )
            with running(broker):
                result = run_client([bookie, broker], "unbatched", "a", messages=self.sizes.a, size=100)
                self._note("a_tcp", result, result["rate"])


def check_wire(directory: Path) -> dict[str, Any]:
    """That (a) puts one message into a batch and one batch into a frame. Ends the run if not."""
    directory.mkdir(parents=True)
    try:
        with running(ServiceProcess(directory / "data", arguments=QUIET)) as (service,):
            count = asyncio.run(
                count_sends(
                    service.host,
                    service.ports["magnetar"],
                    "unbatched",
                    "wire",
                    {"messages": 2000, "size": 100},
                )
            )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if not count.one_by_one or count.messages < 2000:
        raise SystemExit(
            f"bench: (a) sent {count.messages} messages in {count.batches} batches and {count.frames} frames: that is not "
            "one message a batch"
        )
    return {"frames": count.frames, "batches": count.batches, "messages": count.messages}
