"""A round: three fresh bookie processes for each size and workload, one client process for each figure."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from bench import rounds
from bench.bookie.raw import bare_path
from bench.probes import disk, ring_probe
from bench.rounds import Say, name_of
from bench.service_process import ServiceProcess, cpu_time

BOOKIES = 3
QUORUMS = ((1, 1, 1), (3, 2, 2), (3, 3, 2))
SIZES = (1024, 64 << 10)
# As fast as it goes; several at a time at a rate; one at a time at a low rate; the next when the last is confirmed.
MODES = ("full", "paced", "sparse", "single")
RATES = {1024: 5000, 64 << 10: 250}
SPARSE_RATE = 100
# Of one writer: as many entries as a broker keeps outstanding, and no more bytes.
WINDOW_ADDS, WINDOW_BYTES = 2048, 16 << 20
UNCONFIRMED = 10_000
WORKLOADS = "abcd"
TAIL_RATE = 1000
# Client processes forget which ledgers there are; the bookies do not.
_ledgers = itertools.count(1)


class Sizes:
    """How much each workload does."""

    def __init__(self, quick: bool) -> None:
        self.full = {1024: 30_000 if quick else 100_000, 64 << 10: 1_000 if quick else 4_000}
        self.paced_s = 1.0 if quick else 3.0
        self.single = {1024: 500 if quick else 2_000, 64 << 10: 200 if quick else 500}
        self.read = {1024: 20_000 if quick else 50_000, 64 << 10: 500 if quick else 2_000}
        self.recoveries = 1 if quick else 2
        self.ring_records = 500 if quick else 2_000

    def count(self, mode: str, size: int) -> int:
        """Appends of a mode."""
        if mode in ("paced", "sparse"):
            return int(self.paced_s * rate_of(mode, size))
        return self.full[size] if mode == "full" else self.single[size]


class Round(rounds.Round):
    """See bench.rounds."""

    def __init__(
        self,
        directory: Path,
        quick: bool,
        wanted: Collection[str],
        settle_s: float,
        say: Say,
        _number: int = 0,
    ) -> None:
        details: dict[str, Any] = {"appends": {}, "recovery": {}, "reads": {}, "tail": {}}
        super().__init__(directory, wanted, settle_s, say, details)
        self.sizes = Sizes(quick)

    def work(self) -> None:
        """Everything that is wanted."""
        self._probe()
        for letter, workload in (
            ("a", self._appends),
            ("b", self._recovery),
            ("c", self._reads),
            ("d", self._tail),
        ):
            if letter in self.wanted:
                workload()

    def _probe(self) -> None:
        """What no client can pass here: one record at a time, and bytes as fast as they go, without a bookie."""
        self.quiet()
        self.details["ring"] = ring_probe(self.directory, self.sizes.ring_records)
        path = self.directory / "raw-probe"
        try:
            disk.zero_filled(path)
            self.details["path_bytes_per_s"] = bare_path(path)
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _bookies(self) -> Iterator[list[ServiceProcess]]:
        """Fresh ones; killed and removed afterwards."""
        bookies = [
            ServiceProcess(
                self.directory / f"b{number}", command="bookie", arguments=["--log-level", "warning"]
            )
            for number in range(BOOKIES)
        ]
        try:
            for bookie in bookies:
                bookie.start()
            yield bookies
        finally:
            for bookie in bookies:
                if bookie.running:
                    bookie.kill()
                assert bookie.data is not None
                shutil.rmtree(bookie.data, ignore_errors=True)

    # --- (a) appends --------------------------------------------------------------------------------------------------

    def _appends(self) -> None:
        for size in SIZES:
            self.quiet()
            with self._bookies() as bookies:
                warm_up(bookies)
                for quorums in QUORUMS:
                    for mode in MODES:
                        self._append(bookies, size, quorums, mode)
        appends, ring = self.details["appends"], self.details["ring"]
        self.figures["cpu_sparse"] = client_us(appends["1024/3/2/2/sparse"])
        self.figures["cpu_bare"] = bare_us(SPARSE_RATE, self.sizes.count("sparse", 1024), 1024 + 60, 2)
        self.figures["cpu_full"] = client_us(appends["1024/3/2/2/full"])
        self.figures["cpu_paced"] = client_us(appends["1024/3/2/2/paced"])
        self.figures["cpu_full_3/3/2"] = client_us(appends["1024/3/3/2/full"])
        self.figures["single_of_ring"] = appends["1024/3/2/2/single"]["p50_ms"] / ring["p50"]

    def _append(
        self, bookies: list[ServiceProcess], size: int, quorums: tuple[int, int, int], mode: str
    ) -> None:
        result = run_client(
            bookies,
            "appends",
            quorums=quorums,
            mode=mode,
            size=size,
            count=self.sizes.count(mode, size),
            window=min(WINDOW_ADDS, WINDOW_BYTES // size),
            rate=rate_of(mode, size),
        )
        self.details["appends"][f"{size}/{text_of(quorums)}/{mode}"] = result
        cpu = "  ".join(
            f"{who} {seconds / result['appends'] * 1e6:,.0f}" for who, seconds in result["cpu_s"].items()
        )
        self.say(
            f"    {name_of(size):<6} {text_of(quorums)} {mode:<7} {result['appends_per_s']:>9,.0f}/s "
            f"{result['bytes_per_s'] / 1e6:>6,.0f} MB/s  p50 {result['p50_ms']:8.3f}  p99 {result['p99_ms']:8.3f} ms  "
            f"CPU us: {cpu}"
        )

    # --- (b) recovery -------------------------------------------------------------------------------------------------

    def _recovery(self) -> None:
        self.quiet()
        with self._bookies() as bookies:
            warm_up(bookies)
            for quorums in QUORUMS[1:]:
                results = [
                    run_client(bookies, "recovery", quorums=quorums, size=1024, count=UNCONFIRMED)
                    for _ in range(self.sizes.recoveries)
                ]
                # The slowest one counts.
                result = max(results, key=lambda found: found["seconds"])
                self.details["recovery"][text_of(quorums)] = result
                self.figures[f"recovery_{text_of(quorums)}"] = result["seconds"]
                self.say(
                    f"    recovery {text_of(quorums)} {result['seconds']:.2f} s, "
                    f"client CPU {result['cpu_s']['client']:.2f} s"
                )

    # --- (c) reads ----------------------------------------------------------------------------------------------------

    def _reads(self) -> None:
        for size in SIZES:
            self.quiet()
            with self._bookies() as bookies:
                for quorums in QUORUMS:
                    result = run_client(
                        bookies,
                        "reads",
                        quorums=quorums,
                        size=size,
                        count=self.sizes.read[size],
                        window=min(WINDOW_ADDS, WINDOW_BYTES // size),
                    )
                    self.details["reads"][f"{size}/{text_of(quorums)}"] = result
                    self.say(
                        f"    {name_of(size):<6} {text_of(quorums)} reads {result['entries_per_s']:>9,.0f}/s "
                        f"{result['bytes_per_s'] / 1e6:>6,.0f} MB/s"
                    )

    # --- (d) tails ----------------------------------------------------------------------------------------------------

    def _tail(self) -> None:
        self.quiet()
        with self._bookies() as bookies:
            warm_up(bookies)
            for quorums in QUORUMS:
                result = run_client(
                    bookies,
                    "tail",
                    quorums=quorums,
                    size=1024,
                    count=int(self.sizes.paced_s * TAIL_RATE),
                    rate=TAIL_RATE,
                )
                self.details["tail"][text_of(quorums)] = result
                self.say(
                    f"    tail {text_of(quorums)} p50 {result['p50_ms']:8.3f}  p99 {result['p99_ms']:8.3f} ms  "
                    f"{result['entries'] / result['calls']:.1f} entries a call"
                )


def run_client(bookies: list[ServiceProcess], workload: str, **parameters: Any) -> dict[str, Any]:
    """One client process, with CPU seconds by process; those of one role are added up over the bookies."""
    parameters["first_ledger"] = next(_ledgers)
    before = bookie_cpu(bookies)
    addresses = [f"{bookie.host}:{bookie.ports['bookie']}" for bookie in bookies]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench.ledger.client", workload),
            *(json.dumps(addresses), json.dumps(parameters)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        said = " ".join(bookie.errors() for bookie in bookies)
        raise SystemExit(f"bench: the client of {workload} ended with {done.returncode}: {said}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    after = bookie_cpu(bookies)
    cpu = {"client": result["cpu_s"]} | {role: after[role] - before[role] for role in after}
    return result | {"cpu_s": cpu}


def bookie_cpu(bookies: list[ServiceProcess]) -> dict[str, float]:
    """CPU seconds by role, so far."""
    found: dict[str, float] = {}
    for bookie in bookies:
        for role, pid in bookie.processes().items():
            found[role] = found.get(role, 0.0) + cpu_time(pid).total
    return found


def warm_up(bookies: list[ServiceProcess]) -> None:
    """Code is loaded and the first journal file is there."""
    run_client(
        bookies, "appends", quorums=(3, 3, 3), mode="full", size=1024, count=4_000, window=WINDOW_ADDS, rate=0
    )


def client_us(result: dict[str, Any]) -> float:
    """Microseconds of the client's CPU per append."""
    return float(result["cpu_s"]["client"] / result["appends"] * 1e6)


def rate_of(mode: str, size: int) -> int:
    """Appends a second."""
    return SPARSE_RATE if mode == "sparse" else RATES[size]


def bare_us(rate: int, count: int, size: int, copies: int) -> float:
    """Microseconds of CPU for each record that is sent so over bare sockets."""
    arguments = [str(number) for number in (rate, count, size, copies)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.ledger.bare", *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found["cpu_s"] / found["records"] * 1e6


def text_of(quorums: tuple[int, int, int]) -> str:
    """E/Qw/Qa."""
    return "/".join(map(str, quorums))
