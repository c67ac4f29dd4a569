"""A round: every workload with a bookie process of its own; targets are ratios of what one round measured."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from bench import rounds
from bench.bookie.raw import raw_probe
from bench.bookie.watch import Watch, within
from bench.rounds import Say, name_of
from bench.service_process import ServiceProcess
from bench.services import Measured, drop_page_cache
from magnetar.bookie.settings import BookieSettings

MIB = 1 << 20
SIZES = (100, 1024, 64 << 10, MIB)
LEDGERS = (1, 100, 10_000)
ENTRY = 64 << 10  # the size that targets speak of
# What one ledger client keeps on its way to one bookie.
WINDOW_BYTES = 8 * MIB
WINDOW_ADDS = 8192
NEVER_S = 86_400
DEFAULTS = BookieSettings(data_directory="-")
PACED_RATE = 1000
# Journal files are ready when none has changed for so long; waited for at most READY_S.
READY_AFTER_S, READY_S = 0.5, 15.0
WORKLOADS = "abcde"


class Sizes:
    """How much each workload does."""

    def __init__(self, quick: bool) -> None:
        self.cache_bytes = (256 if quick else 768) * MIB
        # What one cell adds: fits beside the rest of a warm-up into half of the cache, overhead included.
        self.absorbed_bytes = self.cache_bytes // 4
        self.absorbed_adds = 200_000 if quick else 400_000
        self.sustained_adds = 250_000 if quick else 600_000
        self.replay_bytes = (128 if quick else 1024) * MIB
        self.read_entries = {1024: 64_000 if quick else 256_000, ENTRY: 2_000 if quick else 6_000}
        self.random_reads = 2_000 if quick else 10_000
        self.paced_rounds = 2 if quick else 4
        self.probe_s = 0.3 if quick else 0.6


class Round(rounds.Round):
    """See bench.rounds."""

    def __init__(
        self,
        directory: Path,
        quick: bool,
        wanted: Collection[str],
        settle_s: float,
        say: Say,
        number: int = 0,
    ) -> None:
        """`number`: of the round, from 0."""
        details: dict[str, Any] = {"raw": [], "absorb": {}, "sustained": {}, "reads": {}}
        super().__init__(directory, wanted, settle_s, say, details)
        self.sizes = Sizes(quick)
        self.number = number

    def work(self) -> None:
        """Everything that is wanted."""
        for letters, workload in (
            ("ae", self._adds),
            ("b", self._reads),
            ("c", self._replay),
            ("d", self._paced),
        ):
            if set(letters) & set(self.wanted):
                workload()
        self._compare()

    def _raw(self) -> None:
        self.details["raw"].append(raw_probe(self.directory, [ENTRY, MIB, 4 * MIB], self.sizes.probe_s))

    @contextlib.contextmanager
    def _bookie(self, **settings: Any) -> Iterator[ServiceProcess]:
        """A fresh bookie with these settings; killed and removed afterwards."""
        service = ServiceProcess(self.directory / "data", command="bookie", arguments=arguments(settings))
        service.start()
        try:
            yield service
        finally:
            if service.running:
                service.kill()
            shutil.rmtree(self.directory / "data", ignore_errors=True)

    # --- (a) adds, (e) memory -----------------------------------------------------------------------------------------

    def _adds(self) -> None:
        if "a" in self.wanted:
            for size in SIZES:
                self.quiet()
                self._absorb(size)
        self.quiet()
        for size in SIZES if "a" in self.wanted else (ENTRY,):
            for ledgers in (LEDGERS[0], LEDGERS[-1]):
                self._sustained(size, ledgers)

    def _absorb(self, size: int) -> None:
        """Nothing is flushed while it is measured; journal files are recycled ones, as they are after the first minute."""
        if size == ENTRY:
            self._raw()
        with self._bookie(write_cache_bytes=self.sizes.cache_bytes, checkpoint_interval_s=NEVER_S) as service:
            first = 1
            turn = self.number % len(LEDGERS)
            for ledgers in LEDGERS[turn:] + LEDGERS[:turn]:
                warm_up(service, first, self.sizes.cache_bytes // 12)
                result = add(
                    service,
                    min(self.sizes.absorbed_adds, self.sizes.absorbed_bytes // size),
                    size,
                    ledgers,
                    first + 1000,
                )
                first += 20_000
                self.details["absorb"][f"{size}/{ledgers}"] = result
                self._say_adds(f"{name_of(size)} x {ledgers:,}", result)
        if size == ENTRY:
            self._raw()

    def _sustained(self, size: int, ledgers: int) -> None:
        """Four times the write cache, with default settings."""
        count = min(self.sizes.sustained_adds, 4 * DEFAULTS.write_cache_bytes // size)
        if size == ENTRY:
            self._raw()
        with self._bookie() as service:
            warm_up(service, 1, DEFAULTS.write_cache_bytes // 12)
            with Watch(service) as watch:
                result = add(service, count, size, ledgers, 1000)
                if ledgers == 1:  # fills the read cache, too
                    run_client(
                        service,
                        "reads",
                        size=size,
                        entries=count,
                        ledgers=1,
                        first_ledger=1000,
                        sequential=True,
                        depth=4,
                    )
        result["highest_pss"], result["highest_resident"] = watch.highest_pss, watch.highest_resident
        result["flushes"] = len(watch.flushes)
        self.details["sustained"][f"{size}/{ledgers}"] = result
        self._say_adds(f"{name_of(size)} x {ledgers:,}, 4 x", result)
        if size == ENTRY:
            self._raw()
        over = (watch.highest_pss - configured_bytes()) / 1e6
        self.figures["memory"] = max(over, self.figures.get("memory", over))

    def _compare(self) -> None:
        """Many ledgers with one; and all with the best of the raw disk: small groups suffer most on a busy machine."""
        for part in ("absorb", "sustained"):
            for size in SIZES:
                one, many = (self.details[part].get(f"{size}/{count}") for count in (1, LEDGERS[-1]))
                if one and many:
                    self.figures[f"interleaved_{part}_{size}"] = many["adds_per_s"] / one["adds_per_s"]
        if not self.details["raw"]:
            return
        synced = {
            size: max(one["synced"][size] for one in self.details["raw"])
            for size in self.details["raw"][0]["synced"]
        }
        path = max(one["path"] for one in self.details["raw"])
        for name, key in (("absorb", f"{ENTRY}/1"), ("sustained", f"{ENTRY}/1")):
            if (result := self.details[name].get(key)) is None:
                continue
            rate = result["bytes_per_s"]
            self.figures[f"{name}_share"] = rate / synced[ENTRY]
            # The probed size that the journal's groups came closest to.
            wrote = result.get("group_bytes", 0)
            distances = {abs(size - wrote): size for size in synced}
            self.figures[f"{name}_group_share"] = rate / synced[distances[min(distances)]]
            self.figures[f"{name}_path_share"] = rate / path

    def _say_adds(self, name: str, result: dict[str, Any]) -> None:
        self.say(
            f"    {name:<20} {result['adds_per_s']:>10,.0f}/s {result['bytes_per_s'] / 1e6:>8,.1f} MB/s"
            f"  groups {result.get('group_bytes', 0):>10,} B"
        )

    # --- (b) reads ----------------------------------------------------------------------------------------------------

    def _reads(self) -> None:
        self.quiet()
        for size, entries in self.sizes.read_entries.items():
            service = ServiceProcess(self.directory / "data", command="bookie", arguments=arguments({}))
            service.start()
            try:
                ledgers = 100
                add(service, entries, size, ledgers, 1)
                service.stop()
                for state in ("cold", "page cache"):
                    for sequential in (True, False):
                        if state == "cold":
                            drop_page_cache(self.directory / "data")
                        service.start()
                        self._read(service, size, entries // ledgers, ledgers, state, sequential)
                        service.stop()
                # A few ledgers that the read cache holds: the first pass fills it.
                fit = max(1, DEFAULTS.read_cache_bytes // 2 // (entries // ledgers * (size + 200)))
                service.start()
                for state in ("", "read cache"):
                    self._read(service, size, entries // ledgers, fit, state, True)
                self._read(service, size, entries // ledgers, fit, "read cache", False)
                service.stop()
            finally:
                if service.running:
                    service.kill()
                shutil.rmtree(self.directory / "data", ignore_errors=True)

    def _read(
        self, service: ServiceProcess, size: int, entries: int, ledgers: int, state: str, sequential: bool
    ) -> None:
        result = run_client(
            service,
            "reads",
            size=size,
            entries=entries,
            ledgers=ledgers,
            first_ledger=1,
            sequential=sequential,
            depth=4 if sequential else 16,
            count=self.sizes.random_reads,
            seed=self.number,
        )
        if not state:
            return
        kind = "sequential" if sequential else "random"
        self.details["reads"][f"{size}/{state}/{kind}"] = result
        self.say(
            f"    {name_of(size)} {kind:<10} {state:<10} {result['entries_per_s']:>10,.0f}/s "
            f"{result['bytes_per_s'] / 1e6:>8,.1f} MB/s  p99 {result['p99_ms']:.2f} ms"
        )

    # --- (c) replay ---------------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        self.quiet()
        count = self.sizes.replay_bytes // 1024
        held_back = {"write_cache_bytes": 8 * self.sizes.replay_bytes, "checkpoint_interval_s": NEVER_S}
        for name, settings in (("replay", {}), ("replay_large", held_back)):
            with self._bookie(**held_back) as service:
                empty_s = service.ready_after_s
                add(service, count, 1024, 100, 1)
                service.kill()
                journal = sum(
                    path.stat().st_size for path in (self.directory / "data").rglob("journal-*.log")
                )
                service.arguments = arguments(settings)
                service.start(timeout_s=300)
                seconds = service.ready_after_s - empty_s
                self.details[name] = {"seconds": seconds, "entries": count, "journal_files_bytes": journal}
                self.figures[name] = seconds * (1 << 30) / (count * 1024)
            self.say(f"    {name:<18} {seconds:>10.2f} s for {count:,} entries of 1 KB")

    # --- (d) p99 while others work ------------------------------------------------------------------------------------

    def _paced(self) -> None:
        found: dict[str, Any] = {}
        self.quiet()
        quiet, flushing, windows = self._while_flushing()
        found["quiet"], found["flush"] = percentiles(quiet), percentiles(flushing) | windows
        self.quiet()
        quiet, compacting, windows = self._while_compacting()
        found["quiet, other bookie"] = percentiles(quiet)
        found["gc, compaction"] = percentiles(compacting) | windows
        self.details["paced"] = found
        if flushing:
            self.figures["flush_p99"] = found["flush"]["p99"] / found["quiet"]["p99"]
        if compacting:
            self.figures["compaction_p99"] = (
                found["gc, compaction"]["p99"] / found["quiet, other bookie"]["p99"]
            )
        for name, figures in found.items():
            self.say(
                f"    adds {name:<20} p50 {figures['p50']:.3f}  p99 {figures['p99']:.3f}  p99.9 {figures['p999']:.3f} ms "
                f"of {figures['samples']:,.0f}"
            )

    def _while_flushing(self) -> tuple[list[float], list[float], dict[str, float]]:
        """The cache is filled, and nothing but paced adds comes until the checkpoint of the interval has flushed it."""
        interval_s = 4.0
        with (
            self._bookie(
                write_cache_bytes=self.sizes.cache_bytes, checkpoint_interval_s=interval_s
            ) as service,
            Watch(service) as watch,
        ):
            result = run_client(
                service,
                "paced",
                size=1024,
                rate=PACED_RATE,
                seconds=interval_s + 1.5,
                rounds=self.sizes.paced_rounds,
                fill_bytes=self.sizes.cache_bytes * 9 // 20,
                settle_s=0.3,
            )
        quiet = [late for at, late in result["samples"] if not within(at, watch.flushes, 0.05)]
        flushing = [late for at, late in result["samples"] if within(at, watch.flushes)]
        return quiet, flushing, lengths(watch.flushes)

    def _while_compacting(self) -> tuple[list[float], list[float], dict[str, float]]:
        """Seven of ten ledgers in every entry log are deleted; rounds of garbage collection come every second."""
        fill = self.sizes.cache_bytes // 2
        settings = {
            "entry_log_bytes": 32 * MIB,
            "checkpoint_interval_s": 1.0,
            "gc_interval_s": 1.0,
            "minor_compaction_interval_s": 1.0,
            "major_compaction_interval_s": 1.0,
        }
        after_s = fill / DEFAULTS.compaction_bytes_per_s + 3
        with self._bookie(**settings) as service, Watch(service) as watch:
            result = run_client(
                service,
                "paced",
                size=1024,
                rate=PACED_RATE,
                seconds=4.0,
                rounds=1,
                fill_bytes=fill,
                settle_s=2.0,
                delete=70,
                after_s=after_s,
            )
        if not watch.compactions:
            raise SystemExit("bench: the bookie compacted nothing")
        began, ended = result["deleted"][0], watch.compactions[-1][1]
        quiet = [late for at, late in result["samples"] if at < began and not within(at, watch.flushes, 0.05)]
        compacting = [late for at, late in result["samples"] if began <= at <= ended]
        return quiet, compacting, lengths(watch.compactions)


def arguments(settings: dict[str, Any]) -> list[str]:
    """Of the command line."""
    found = ["--log-level", "warning"]
    for name, value in settings.items():
        found += ["--set", f"bookie.{name}={value}"]
    return found


def configured_bytes() -> int:
    """What the default settings allow to be held."""
    return DEFAULTS.write_cache_bytes + DEFAULTS.read_cache_bytes + DEFAULTS.journal_ring_bytes


def run_client(service: ServiceProcess, workload: str, **parameters: Any) -> dict[str, Any]:
    """One client process, with CPU seconds by process."""
    measured = Measured([service])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench.bookie.client", workload, service.host),
            *(str(service.ports["bookie"]), json.dumps(parameters)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"bench: the client of {workload} ended with {done.returncode}: {service.errors()}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found = measured.result()
    return result | found | {"cpu_s": found["cpu_s"] | {"client": result["cpu_s"]}}


def add(service: ServiceProcess, count: int, size: int, ledgers: int, first_ledger: int) -> dict[str, Any]:
    """As fast as it goes."""
    return run_client(
        service,
        "adds",
        count=count,
        size=size,
        ledgers=ledgers,
        first_ledger=first_ledger,
        window_bytes=WINDOW_BYTES,
        window_adds=WINDOW_ADDS,
    )


def warm_up(service: ServiceProcess, first_ledger: int, piece_bytes: int) -> None:
    """Adds until the mark moved twice, and waits until journal files are ready: a bookie as it is after its first minute.

    The cache holds a piece at most then.
    """
    assert service.data is not None
    mark = Path(service.data) / "bookie" / "mark"
    before, moves = mark.stat().st_ino, 0
    for number in range(80):
        add(service, max(1, piece_bytes // ENTRY), ENTRY, 1, first_ledger + number)
        if (now := mark.stat().st_ino) != before:
            before, moves = now, moves + 1
            if moves == 2:
                break
    else:
        raise SystemExit("bench: the bookie does not flush its write cache")
    # Files are zero-filled and recycled in the background.
    until, since, sizes = time.monotonic() + READY_S, time.monotonic(), journal_sizes(service)
    while time.monotonic() < min(until, since + READY_AFTER_S):
        time.sleep(0.05)
        if (now_sizes := journal_sizes(service)) != sizes:
            sizes, since = now_sizes, time.monotonic()


def journal_sizes(service: ServiceProcess) -> dict[str, int]:
    """Bytes of each journal file."""
    assert service.data is not None
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(Path(service.data) / "bookie" / "journal"):
            found[entry.name] = entry.stat().st_size
    return found


def lengths(windows: list[tuple[float, float]]) -> dict[str, float]:
    """How many there were, and their seconds together."""
    return {"windows": len(windows), "seconds": sum(ended - began for began, ended in windows)}


def percentiles(latencies: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(latencies) or [0.0]
    found: dict[str, float] = {"samples": len(latencies), "maximum": ordered[-1] * 1e3}
    for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
        found[name] = ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3
    return found
