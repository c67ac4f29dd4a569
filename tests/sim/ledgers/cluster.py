"""The machines and clients of one run: starts them, breaks them as the plan has it, heals them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from functools import partial
from typing import Any

from magnetar.ledger import LedgerMetadata
from magnetar.ledger.core.metadata import LedgerState
from sim.deliveries import Violation
from sim.ledgers.clients import ClientContext, Tail, Writer, delete, recover
from sim.ledgers.history import History, LedgerHistory, check_change
from sim.ledgers.machines import Contents, Machine
from sim.ledgers.metadata import SERVICE, Chances, MetadataService
from sim.ledgers.plan import Plan
from sim.ledgers.targeted_faults import TargetedFaults
from support.sim import SimLoop, SimProcess

MOST_LOOKED_AT = 100  # confirmed entries, at a change of ensembles
LEAST_ACKNOWLEDGED = 40  # a storm goes on, milder, until so much was


class Cluster:
    """All of one run."""

    writers: type[Writer] = Writer  # of the chains
    machine: type[Machine] = Machine

    def __init__(self, loop: SimLoop, plan: Plan) -> None:
        self.loop = loop
        self.plan = plan
        self.history = History()
        self.metadata = MetadataService(loop)
        self.metadata.chances = plan.chances
        self.context = ClientContext(loop, self.metadata, self.history, plan)
        self.machines = [
            self.machine(
                loop,
                self.metadata,
                f"b{number}",
                may_be_damaged=number < plan.victims,
                storage=storage,
                keep_backups="restored" in plan.faults,
            )
            for number, storage in enumerate(plan.storage)
        ]
        self._by_name = {machine.name: machine for machine in self.machines}
        self.context.power_fails = self.power_fails
        self.clients: dict[str, SimProcess] = {}
        self.targeted_faults = TargetedFaults(loop, self.metadata, self.machines)
        for machine in self.machines:
            machine.on_ready = self._check_fences
        self.history.check_stored = self.check_stored
        self.history.excused = self._may_be_damaged
        self.metadata.on_change = self._metadata_changed
        self.metadata.on_send = self.targeted_faults.sent
        self.context.answers.on_add = self.targeted_faults.added
        self.context.answers.on_fenced = self.targeted_faults.fenced
        self.context.answers.may_be_forgotten = self._may_be_forgotten
        self.context.answers.deleting = lambda ledger_id: self.history.ledgers[ledger_id].deleting
        self.tails: list[tuple[Tail, list[LedgerHistory]]] = []
        self.storming = True
        self._names = 0
        loop.network.latency = plan.latency_s
        loop.network.tail_latency = plan.late_packets

    def start(self) -> None:
        """Machines and chains."""
        for machine in self.machines:
            machine.start()

    def launch(self, role: str, work: Coroutine[Any, Any, None]) -> SimProcess:
        """A client process; what it raises ends the run."""
        self._names += 1
        name = f"{role}-{self._names}"
        process = self.clients[name] = self.loop.start_process(name)
        process.at_death(partial(self.clients.__delitem__, name))
        task = process.spawn(work, name=name)

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled() or not process.alive:
                return
            if (error := task.exception()) is not None:
                self.loop.call_exception_handler({"message": f"{name} failed", "exception": error})
            self.loop.call_outside(0.0, process.kill)  # its work is done: its sockets close

        task.add_done_callback(ended, context=contextvars.Context())
        return process

    # --- writers and their successors --------------------------------------------------------------------------------

    async def chain(self, name: str) -> None:
        """Ledger after ledger, as a topic has them: each ends in one of the plan's ways and is taken over if need be."""
        ledgers: list[LedgerHistory] = []
        tail = Tail(self.context, f"tail-{name}")
        self.tails.append((tail, ledgers))
        self.launch(f"tail-{name}", tail.run(ledgers))
        while self.storming:
            writer = self.writers(self.context, f"writer-{name}")
            process = self.launch(f"writer-{name}", writer.run())
            if not await self._until(lambda writer=writer: writer.ledger is not None, 5.0):
                process.kill()
                continue
            ledger = writer.ledger
            assert ledger is not None
            ledgers.append(ledger)
            await self._turn(process, ledger)
            await self._end(writer, process)
            if ledger.closed is None:
                await self._take_over(ledger)
            rng, plan = self.loop.rng, self.plan
            stands_still = process.paused  # and finds, when it goes on, that its ledger is deleted
            self.loop.call_outside(stands_still + rng.uniform(0.0, plan.stale_s), process.kill)
            if ledger.closed is not None and rng.random() < plan.delete + 0.5 * stands_still:
                self.launch("deleter", delete(self.context, ledger))

    async def _turn(self, process: SimProcess, ledger: LedgerHistory) -> None:
        rng = self.loop.rng
        seconds = rng.uniform(*self.plan.turn_s)
        if rng.random() < self.plan.squeeze:
            for _ in range(rng.choice((1, 1, 2))):
                self.loop.call_outside(
                    seconds * rng.uniform(0.1, 1.0), self.targeted_faults.squeeze, process, ledger.ledger_id
                )
        await asyncio.sleep(seconds)

    async def _end(self, writer: Writer, process: SimProcess) -> None:
        rng = self.loop.rng
        end = rng.choice(self.plan.ends)
        self.loop.trace.fault(f"writer_{end}", process.name)
        match end:
            case "close":
                writer.stopping = True
                await self._until(lambda: writer.closed or writer.error is not None, 2.0)
            case "crash":
                process.kill()
            case "pause":
                process.pause(rng.uniform(0.3, 3.0))
            case "isolate":
                for machine in self.machines:
                    if rng.random() < 0.7:
                        names = (process.name, machine.name)
                        self.loop.network.block(*rng.choice((names, names[::-1])), rng.uniform(0.3, 3.0))
            case "gap":  # a bookie lacks what the others store, and successors can reach it
                assert writer.writer is not None
                bookie = rng.choice(writer.writer.metadata.last_ensemble.bookies)
                self.loop.network.block(process.name, bookie, rng.uniform(0.5, 3.0))
                await asyncio.sleep(rng.uniform(0.02, 0.4))
            case "detach":
                writer.detaching = True
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0.0, 0.3))

    async def _take_over(self, ledger: LedgerHistory) -> None:
        """One or more recoverers, some of which die on the way."""
        rng = self.loop.rng
        for _ in range(rng.choice((1, 1, 2, 3))):
            process = self.launch("recoverer", recover(self.context, ledger, f"recoverer {self._names + 1}"))
            if rng.random() < self.plan.targeted:
                self.targeted_faults.target_recoverer(process, ledger)
            elif rng.random() < 0.25:
                self.loop.trace.fault("recoverer_crash", process.name)
                self.loop.call_outside(rng.uniform(0.0, 0.1), process.kill)
            await asyncio.sleep(rng.expovariate(1 / 0.02))
        await self._until(lambda: ledger.closed is not None or not self.storming, 2.0)

    async def _until(self, condition: Any, seconds: float) -> bool:
        deadline = self.loop.time() + seconds
        while not condition():
            if self.loop.time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    # --- faults ------------------------------------------------------------------------------------------------------

    async def storm(self) -> None:
        """Faults, one after another, as the plan has them."""
        rng, plan = self.loop.rng, self.plan
        end = self.loop.time() + plan.storm_s
        while (now := self.loop.time()) < end or (now < end + 60.0 and self._too_little()):
            # A seed may be so rough that nothing gets done: then it goes on, and milder and milder.
            await asyncio.sleep(
                rng.expovariate(1 / plan.mean_gap_s) * (1 if now < end else 8 + 4 * (now - end))
            )
            (kind,) = rng.choices(plan.faults, plan.weights)
            self._break(kind, rng.choice(self.machines))
        self.storming = False

    def _too_little(self) -> bool:
        return sum(ledger.confirmed + 1 for ledger in self.history.ledgers.values()) < LEAST_ACKNOWLEDGED

    def _break(self, kind: str, machine: Machine) -> None:
        rng = self.loop.rng
        match kind:
            case "crash_process":
                machine.crash(False)
            case "crash_power":
                machine.crash(True)
            case "crash_at_call":
                machine.crash_at_call(rng.random() < 0.7)
            case "outage":
                if rng.random() < 0.3:
                    self.power_fails()
            case "pause_bookie":
                machine.pause(rng.choice((rng.uniform(0.02, 0.4), rng.uniform(0.4, 3.0))))
            case "pause_client" if self.clients:
                self.clients[rng.choice(list(self.clients))].pause(rng.uniform(0.05, 2.0))
            case "one_way":
                self._block_one_way(machine)
            case "cut":
                self.loop.network.cut_one()
            case "partition":
                self.loop.network.partition(rng.uniform(0.05, 1.0))
            case "no_space":
                machine.fill_disk(rng.uniform(0.3, 2.0))
            case "disk_error":
                machine.break_disk()
            case "bit_flip" if self.plan.victims:
                self.machines[rng.randrange(self.plan.victims)].flip_bit()
            case "slow_disk":
                machine.slow_down(rng.uniform(0.3, 2.0))
            case "session":
                self.metadata.expire_one()
            case "emptied" | "swapped" | "restored":
                self._exchange_contents(kind, machine)

    def _exchange_contents(self, kind: str, machine: Machine) -> None:
        """A bookie that clients have met comes back as another one, for a while."""
        seconds = self.loop.rng.uniform(0.4, 2.0)
        ready = [
            m for m in self.machines if m.process and not (m.wrong or m.damaged) and m.registered_start()
        ]
        if machine not in ready:
            return
        match kind:
            case "emptied":
                machine.come_back_with(Contents("nobody", machine.contents.storage), seconds)
            case "swapped":
                others = [other for other in ready if other is not machine]
                if not others:
                    return
                other = self.loop.rng.choice(others)
                own = machine.contents
                machine.come_back_with(other.contents, seconds)
                other.come_back_with(own, seconds)
            case "restored":
                if machine.backup is None or machine.registered_start() <= machine.backup.starts:
                    return
                machine.come_back_with(machine.backup.contents.copied(), seconds)
        self.loop.trace.fault(kind, machine.name)

    def _block_one_way(self, machine: Machine) -> None:
        rng = self.loop.rng
        ends = [machine.name, rng.choice([*self.clients, SERVICE])]
        rng.shuffle(ends)
        self.loop.network.block(ends[0], ends[1], rng.uniform(0.1, 2.0))

    def has(self, bookie: str, ledger_id: int, entry_id: int) -> bool:
        """Whether a bookie has the entry; of one that does not run, whether it has acknowledged it (rule 8)."""
        has = self._by_name[bookie].has(ledger_id, entry_id)
        return self.context.answers.holds(bookie, ledger_id, entry_id) if has is None else has

    def _may_be_damaged(self, ledger: LedgerHistory) -> bool:
        """Whether somebody damaged a bookie of the ledger: what that one has forgotten nobody can expect of it."""
        metadata = self.metadata.ledger(ledger.ledger_id)
        damaged = {machine.name for machine in self.machines if machine.damaged}
        return bool(damaged) and (
            metadata is None or any(damaged.intersection(ensemble.bookies) for ensemble in metadata.ensembles)
        )

    def check_stored(self, ledger: LedgerHistory, entry_id: int) -> None:
        """At the moment of an acknowledgement: Qa bookies of the ensemble in the metadata have the entry."""
        node = self.metadata.ledger(ledger.ledger_id)
        if node is None or ledger.closed is not None:
            return
        bookies = node.ensemble_of(entry_id).bookies
        write_set = [bookies[position] for position in node.striping.write_set(entry_id)]
        have = [name for name in write_set if self.has(name, ledger.ledger_id, entry_id)]
        acked = self.context.answers.acks(ledger.ledger_id, entry_id)
        if node.state is LedgerState.OPEN:  # a recoverer may have put it elsewhere
            have = [name for name in have if name in acked]
        if len(have) < ledger.ack_quorum:
            raise Violation(
                f"ledger {ledger.ledger_id}: entry {entry_id} was acknowledged and is on {have} only; its write set is "
                f"{write_set}"
            )

    def _metadata_changed(
        self, process: str, ledger_id: int, before: LedgerMetadata, after: LedgerMetadata
    ) -> None:
        ledger = self.history.ledgers.get(ledger_id)
        if ledger is not None:
            check_change(ledger, before, after, process)
            if before.ensembles != after.ensembles:
                self._check_recorded(ledger, after)
        self.targeted_faults.changed(process, after)

    def _check_fences(self, machine: Machine) -> None:
        """Checks a restarted bookie: every ledger that it has confirmed to be fenced is fenced (rule 6)."""
        assert machine.bookie is not None
        for ledger_id in self.context.answers.fences(machine.name):
            if self._may_be_forgotten(machine.name, ledger_id):
                continue
            if not (machine.damaged or machine.bookie.ledgers.peek(ledger_id).fenced):
                raise Violation(f"{machine.name} lost the fence of ledger {ledger_id} with its last process")

    def _may_be_forgotten(self, bookie: str, ledger_id: int) -> bool:
        """Whether the bookie's tombstone of a deleted ledger may be over, and the fence with it (rule 7)."""
        ledger = self.history.ledgers.get(ledger_id)
        return ledger is not None and ledger.deleting and self._by_name[bookie].forgets_deletions

    def _check_recorded(self, ledger: LedgerHistory, metadata: LedgerMetadata) -> None:
        """Whenever ensembles change: what was confirmed of the last two of them stands where they say."""
        first = metadata.ensembles[-2:][0].first_entry
        for entry_id in range(max(first, ledger.confirmed - MOST_LOOKED_AT), ledger.confirmed + 1):
            bookies = metadata.ensemble_of(entry_id).bookies
            write_set = [bookies[position] for position in metadata.striping.write_set(entry_id)]
            have = [name for name in write_set if self.has(name, ledger.ledger_id, entry_id)]
            if len(have) < ledger.ack_quorum:
                raise Violation(
                    f"ledger {ledger.ledger_id}: its metadata now has the confirmed entry {entry_id} on {write_set}, "
                    f"and it is on {have} only"
                )

    def power_fails(self) -> None:
        """All machines at once."""
        self.loop.trace.fault("outage")
        for machine in self.machines:
            machine.crash(True)

    def heal(self) -> None:
        """Nothing planted fires any more; what is partitioned, is not."""
        network = self.loop.network
        self.targeted_faults.over = True
        self.metadata.slow.clear()
        network.unblock_all()
        network.latency, network.tail_latency = (30e-6, 400e-6), (0.0, 0.02)
        self.metadata.chances = Chances()
        for machine in self.machines:
            machine.heal()
        self.loop.trace.record("healed")

    def end_of_faults(self) -> None:
        """Pauses and restarts are over: from here on a bookie that stops by itself is a failure."""
        for machine in self.machines:
            machine.end_of_faults()
