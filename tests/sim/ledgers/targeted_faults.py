"""Faults at a chosen moment: random faults hit the few milliseconds of an ensemble change or a close too rarely.

A double fault for a writer (`squeeze`), one of:

    delayed    the answers of one bookie of its ensemble are delayed, another bookie fails meanwhile, and the metadata
    service
               is slow with the change: answers arrive before, while and after the new ensemble is recorded
    refused    a bookie that has adds to sync refuses those that follow: it is replaced, and acknowledges what it has later

A fault for a recoverer, one of:

    marked     it dies soon after it has written IN_RECOVERY: the writer goes on with some bookies fenced and others not
    re_add     the bookie that it re-adds to fails, while another bookie does not answer it
    replaced   the same, and it dies when it re-adds to a bookie that is not in the metadata
    closing    it dies or stands still when it has sent its closing compare-and-set
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from magnetar.ledger import LedgerMetadata
from magnetar.ledger.core.metadata import LedgerState
from sim.ledgers.history import LedgerHistory
from sim.ledgers.machines import Machine
from sim.ledgers.metadata import MetadataService
from support.sim import SimLoop, SimProcess

KINDS = (*["marked"] * 2, *["re_add"] * 5, *["replaced"] * 3, *["closing"] * 2)
FAILURES = ("crash", "power", "full", "cut", "cut")


@dataclass
class _Target:
    kind: str
    process: SimProcess
    ledger: LedgerHistory
    re_adds: int  # that pass before something happens
    silent: str = ""  # the bookie that answers the fence, and then nothing for a while


class TargetedFaults:
    """The targeted faults of one run.

    The answer checker and the metadata service call it; faults happen in a later turn of the loop.
    """

    def __init__(self, loop: SimLoop, metadata: MetadataService, machines: list[Machine]) -> None:
        self.over = False
        self._loop = loop
        self._metadata = metadata
        self._machines = {machine.name: machine for machine in machines}
        self._refusing: dict[
            str, str
        ] = {}  # writer -> the bookie that takes one more burst and then refuses adds
        self._waiting: dict[str, _Target] = {}  # process -> the fault that waits for it

    # --- writers -----------------------------------------------------------------------------------------------------

    def squeeze(self, process: SimProcess, ledger_id: int) -> None:
        """Makes two of the ledger's bookies fail at once, for up to 0.3 s."""
        rng, network = self._loop.rng, self._loop.network
        metadata = self._metadata.ledger(ledger_id)
        if self.over or not process.alive or metadata is None or metadata.ensemble_size < 2:
            return
        if rng.random() < 0.4:
            self._refuse(process, metadata)
            return
        delayed, failing = rng.sample(metadata.last_ensemble.bookies, 2)
        self._loop.trace.fault("squeeze", process.name, delayed, failing)
        seconds = rng.choice((rng.uniform(0.003, 0.03), rng.uniform(0.03, 0.2)))
        network.block(delayed, process.name, seconds)
        slow_s = rng.choice((0.0, rng.uniform(0.0, seconds)))
        self._metadata.slow[process.name] = slow_s
        self._loop.call_outside(seconds + 2 * slow_s + 0.1, self._metadata.slow.pop, process.name, None)
        self._loop.call_outside(rng.uniform(0.0, seconds), self._fail, failing, process)
        if rng.random() < 0.3:
            self._loop.call_outside(rng.uniform(0.0, 2 * seconds), self._fail, delayed, process)

    def _refuse(self, process: SimProcess, metadata: LedgerMetadata) -> None:
        rng = self._loop.rng
        bookies = metadata.last_ensemble.bookies
        refusing = rng.choice(bookies)
        self._loop.trace.fault("squeeze_refused", process.name, refusing)
        for name, machine in self._machines.items():
            if name == refusing or name not in bookies:  # a replacement must not be faster
                machine.delay_journal(rng.uniform(0.05, 0.3), 0.8)
        self._refusing[process.name] = refusing
        self._loop.call_outside(0.5, self._refusing.pop, process.name, None)

    def added(self, process: str, bookie: str, ledger_id: int, recovery: bool) -> None:
        """An add is sent."""
        if recovery:
            self._re_added(process, bookie, ledger_id)
        elif self._refusing and self._refusing.get(process) == bookie and not self.over:
            del self._refusing[process]
            rng, machine = self._loop.rng, self._machines[bookie]
            read_only = rng.choice((machine.turn_read_only, partial(machine.fill_disk, at_once=True)))
            self._loop.call_outside(rng.uniform(0.001, 0.02), read_only, rng.uniform(0.2, 1.0))

    def _fail(self, bookie: str, process: SimProcess, recovery: bool = False) -> None:
        """One of the ways in which a bookie makes its adds fail; an operator's "read-only" lets recoveries pass."""
        rng, machine = self._loop.rng, self._machines[bookie]
        if self.over:
            return
        match rng.choice(FAILURES if recovery else (*FAILURES, "operator")):
            case "crash":
                machine.crash(False)
            case "power":
                machine.crash(True)
            case "operator":
                machine.turn_read_only(rng.uniform(0.2, 1.0))
            case "full":
                machine.fill_disk(rng.uniform(0.3, 1.5), at_once=True)
            case "cut":
                names = {bookie, process.name}
                for link in self._loop.network.live_links():
                    ends = {end.process.name for end in (link.client, link.server) if end.process is not None}
                    if ends == names:
                        self._loop.trace.fault("cut", link.number)
                        link.cut()

    # --- recoverers --------------------------------------------------------------------------------------------------

    def target_recoverer(self, process: SimProcess, ledger: LedgerHistory) -> None:
        """Chooses the fault for a recoverer that has just been started."""
        rng = self._loop.rng
        kind = rng.choice(KINDS)
        target = self._waiting[process.name] = _Target(kind, process, ledger, rng.choice((0, 0, 0, 1, 3)))
        metadata = self._metadata.ledger(ledger.ledger_id)
        if kind in ("re_add", "replaced") and metadata is not None:
            silent = rng.choice(metadata.last_ensemble.bookies)
            match rng.choice(("at once", "fenced", "fenced", "never")):
                case "at once":
                    self._loop.network.block(silent, process.name, rng.uniform(0.2, 1.2))
                case "fenced":
                    target.silent = silent

    def fenced(self, process: str, bookie: str) -> None:
        """A bookie has answered the fence of a recoverer, which will read from it."""
        target = self._waiting.get(process)
        if target is not None and target.silent == bookie and not self.over:
            target.silent = ""
            # Mostly for longer than a read may take: the others are asked then, a replacement among them.
            self._loop.network.block(bookie, process, self._loop.rng.uniform(0.4, 1.3))

    def _re_added(self, process: str, bookie: str, ledger_id: int) -> None:
        target = self._waiting.get(process)
        if target is None or self.over or target.kind not in ("re_add", "replaced"):
            return
        rng = self._loop.rng
        metadata = self._metadata.ledger(ledger_id)
        if metadata is not None and bookie not in metadata.last_ensemble.bookies:
            if target.kind == "replaced":
                self._trigger(target)
                self._loop.call_outside(rng.choice((0.0, rng.uniform(0.0, 0.008))), target.process.kill)
            return
        target.re_adds -= 1
        if target.re_adds == -1:
            if target.kind == "re_add":
                self._trigger(target)
            self._loop.call_outside(0.0, self._fail, bookie, target.process, True)

    def sent(self, process: str, path: str, value: bytes) -> None:
        """A process sends a change of metadata."""
        target = self._waiting.get(process)
        if target is None or self.over or target.kind != "closing":
            return
        if LedgerMetadata.decode(value, target.ledger.ledger_id).closed:
            rng = self._loop.rng
            self._trigger(target)
            if rng.random() < 0.6:
                self._loop.call_outside(rng.uniform(0.0, 0.005), target.process.kill)
            else:
                self._loop.call_outside(0.0, target.process.pause, rng.uniform(0.1, 1.0))

    def changed(self, process: str, metadata: LedgerMetadata) -> None:
        """The metadata service has made a change."""
        target = self._waiting.get(process)
        if target is not None and not self.over and target.kind == "marked":
            if metadata.state is LedgerState.IN_RECOVERY:
                self._trigger(target)
                self._loop.call_outside(self._loop.rng.uniform(0.0, 0.02), target.process.kill)

    def _trigger(self, target: _Target) -> None:
        del self._waiting[target.process.name]
        self._loop.trace.fault(f"targeted_{target.kind}", target.process.name)
