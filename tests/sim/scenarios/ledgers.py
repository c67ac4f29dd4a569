"""A cluster of bookies and its ledger clients under a storm of faults, as a swarm draws them for each seed.

Real: bookies (journal, write cache, entry logs, checkpoints, garbage collection, recovery) with their servers, ledger
clients with writers, recoveries, readers and the TCP transport, framed connections. Simulated: disks, network, clock,
chance, the metadata service; disk worker and journal writers are the inline ones or stand-ins that work beside the bookie
(sim.ledgers.disk_processes), the location index is a model that keeps what was flushed.

    storm (3 to 6 s): chains of ledgers are written, taken over by racing recoverers, tailed, deleted; everything breaks
    heal: a minute at most until every ledger is closed, read to its end, and a new one can be written
    power loss everywhere: every ledger is read again; each acknowledged entry stands on Qa bookies of its ensemble
"""

from __future__ import annotations

import asyncio
from typing import Any

from magnetar.ledger import LedgerMetadata
from magnetar.ledger.directory import BOOKIES_PATH
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto.errors import EntryDamaged, EntryNotFound, LedgerNotFound, MagnetarError
from sim.deliveries import Violation
from sim.ledgers.clients import Writer, recover
from sim.ledgers.cluster import Cluster
from sim.ledgers.history import LedgerHistory
from sim.ledgers.machines import Machine
from sim.ledgers.plan import draw
from support.sim import SimLoop, Trace

EXPECTED_FAULTS = (
    "crash_process",
    "crash_power",
    "crash_at_call",
    "power_loss",
    "lost_page",
    "outage",
    "pause",
    "one_way",
    "cut",
    "partition",
    "no_space",
    "sync_EIO",
    "bit_flip",
    "slow_disk",
    "session_expired",
    "session_timeout",
    "metadata_answer_lost",
    "metadata_request_lost",
    "writer_close",
    "writer_crash",
    "writer_pause",
    "writer_isolate",
    "writer_takeover",
    "writer_detach",
    "writer_gap",
    "recoverer_crash",
    "uncached_read",
    "clock_set",
    "read_only",
    "squeeze",
    "squeeze_refused",
    "targeted_marked",
    "targeted_re_add",
    "targeted_replaced",
    "targeted_closing",
    "emptied",
    "swapped",
    "restored",
)
CONVERGED_WITHIN_S = 60.0
CALM_S = 3.5  # the last pause, partition and restart are over
MINIMUM_ACKNOWLEDGED = 40  # of all ledgers, the last one among them
HANG_ENTRIES = 10
HANG_S = 2.2  # add timeout (0.5 s, noticed within a tenth more), a second, and half a second for the hundred callbacks
LAST_ENTRIES = 25  # of the ledger that is written when everything is healed


async def converge(cluster: Cluster) -> Writer:
    """Every ledger closed and read, every machine registered, a new ledger written; raises Violation after a minute."""
    loop, history = cluster.loop, cluster.history
    deadline = loop.time() + CONVERGED_WITHIN_S
    last = Writer(cluster.context, "last writer")
    last.limit = LAST_ENTRIES
    cluster.launch("last writer", last.run())
    judged: dict[int, None] = {}
    waits: list[str] = []
    while loop.time() < deadline:
        for ledger in history.open_ledgers():
            if ledger is not last.ledger and ledger.ledger_id not in judged:
                judged[ledger.ledger_id] = None
                cluster.launch("judge", recover(cluster.context, ledger, "judge"))
        await asyncio.sleep(0.1)
        waits = await _what_waits(cluster, last)
        if not waits:
            return last
    raise Violation(f"not converged {CONVERGED_WITHIN_S} s after healing: {waits}; {history.counts()}")


async def _what_waits(cluster: Cluster, last: Writer) -> list[str]:
    waits = [
        f"ledger {ledger.ledger_id} is open"
        for ledger in cluster.history.open_ledgers()
        if ledger is not last.ledger
    ]
    waits += [
        f"{tail.name} is in ledger {ledger.ledger_id}"
        for tail, ledgers in cluster.tails
        for ledger in ledgers
        if ledger.ledger_id not in tail.done and not ledger.deleting
    ]
    names = await cluster.metadata.truth.children(BOOKIES_PATH)
    waits += [f"{m.name} is not registered" for m in cluster.machines if not m.lost and m.name not in names]
    if last.ledger is None or last.ledger.confirmed != LAST_ENTRIES - 1:
        waits.append(
            f"the last ledger is not written: {last.ledger and last.ledger.confirmed} {last.error!r}"
        )
    return waits


async def check_idle_ledger(cluster: Cluster, last: Writer) -> None:
    """Rule 19: readers learn of the last entry of a writer that has nothing more to append; also after a power loss."""
    ledger = last.ledger
    assert ledger is not None
    interval_s = cluster.plan.explicit_lac_s

    async def look(found: list[int]) -> None:
        client, _ = await cluster.context.client()
        reader = await cluster.context.open(client, ledger, "the last reader")
        cluster.history.last_confirmed(ledger, reader.last_add_confirmed, "the last reader")
        found.append(reader.last_add_confirmed)

    await asyncio.sleep(interval_s + 2.5)
    await _look_until(cluster, look, "an idle writer's last entry was not announced")
    fences = {machine.name: machine.fences() for machine in cluster.machines}
    cluster.power_fails()
    await asyncio.sleep(1.0)
    for machine in cluster.machines:
        lost = [ledger_id for ledger_id in fences[machine.name] if not _fenced(machine, ledger_id)]
        if lost:
            raise Violation(f"{machine.name} lost the fences of ledgers {lost} with the power")
    await _look_until(cluster, look, "an idle writer's explicit LAC was lost with the power")


def _fenced(machine: Machine, ledger_id: int) -> bool:
    return machine.bookie is None or machine.bookie.ledgers.peek(ledger_id).fenced


async def check_hung_bookie(cluster: Cluster) -> None:
    """Rule 21: with a spare bookie at hand, one that hangs delays nobody for longer than the add timeout and a second."""
    usable = [machine for machine in cluster.machines if machine.bookie is not None and not machine.damaged]
    if len(usable) <= cluster.plan.quorums[0] or len(usable) < len(cluster.machines):
        return
    writer = Writer(cluster.context, "writer beside a hung bookie")
    writer.limit = HANG_ENTRIES
    cluster.launch("writer-hang", writer.run())
    await _until_confirmed(cluster, writer, HANG_ENTRIES, 20.0)
    assert writer.writer is not None
    hung = cluster.loop.rng.choice(writer.writer.metadata.last_ensemble.bookies)
    next(machine for machine in cluster.machines if machine.name == hung).pause(HANG_S)
    writer.limit += HANG_ENTRIES
    await _until_confirmed(cluster, writer, writer.limit, HANG_S - 0.5)
    writer.detaching = True
    await asyncio.sleep(HANG_S - 1.0)
    await _recover_beside_hung_bookie(cluster, writer)


async def _recover_beside_hung_bookie(cluster: Cluster, writer: Writer) -> None:
    """One that hangs delays a recovery no longer than a writer: it is fenced, read and closed without it."""
    ledger, core = writer.ledger, writer.writer
    assert ledger is not None
    assert core is not None
    if ledger.ack_quorum == 1:  # then it may be the only one that knows the end
        return
    hung = cluster.loop.rng.choice(core.metadata.last_ensemble.bookies)
    next(machine for machine in cluster.machines if machine.name == hung).pause(HANG_S)
    cluster.launch("recoverer-hang", recover(cluster.context, ledger, "recoverer beside a hung bookie"))
    await asyncio.sleep(HANG_S - 0.5)
    if ledger.closed is None:
        raise Violation(
            f"ledger {ledger.ledger_id} is not recovered after {HANG_S - 0.5} s: bookie {hung} hangs"
        )
    await asyncio.sleep(0.5)


async def check_memory(cluster: Cluster) -> None:
    """With Qa < Qw entries are confirmed without a bookie that stands still; what waits for it is bounded."""
    _, write_quorum, ack_quorum = cluster.plan.quorums
    if ack_quorum == write_quorum or any(machine.bookie is None for machine in cluster.machines):
        return
    if cluster.loop.rng.random() < 0.5:  # it costs as much as all the rest
        return
    writer = Writer(cluster.context, "writer beside a slow bookie")
    writer.sizes, writer.bursts, writer.limit = (
        (7000,),
        (20,),
        260,
    )  # 1.8 MB, two thirds of it for each bookie at least
    writer.gap_s, writer.most_outstanding = 0.015, 100
    process = cluster.launch("writer-slow", writer.run())
    await _until_confirmed(cluster, writer, 1, 20.0)
    assert writer.writer is not None
    slow = cluster.loop.rng.choice(writer.writer.metadata.last_ensemble.bookies)
    next(machine for machine in cluster.machines if machine.name == slow).pause(0.45)
    limit = cluster.context.settings.max_outstanding_bytes
    until = cluster.loop.time() + 0.4
    while cluster.loop.time() < until:
        await asyncio.sleep(0.02)
        waits = cluster.context.answers.outstanding.get((process.name, slow), 0)
        if waits > limit:
            raise Violation(f"{waits} bytes wait for {slow}, max_outstanding_bytes={limit} may")
    writer.detaching = True


async def _until_confirmed(cluster: Cluster, writer: Writer, entries: int, seconds: float) -> None:
    deadline = cluster.loop.time() + seconds
    while writer.ledger is None or writer.ledger.confirmed < entries - 1:
        if cluster.loop.time() > deadline:
            raise Violation(
                f"{writer.name} has no {entries} entries confirmed after {seconds} s: {writer.error!r}"
            )
        await asyncio.sleep(0.02)


async def _look_until(cluster: Cluster, look: Any, wrong: str) -> None:
    found: list[int] = []
    cluster.launch("last reader", look(found))
    deadline = cluster.loop.time() + 20.0
    while not found and cluster.loop.time() < deadline:
        await asyncio.sleep(0.05)
    if found != [LAST_ENTRIES - 1]:
        raise Violation(f"{wrong}: {found}, {LAST_ENTRIES - 1} entries were confirmed")


async def check_everything(cluster: Cluster, last: Writer) -> None:
    """After the power loss: all ledgers are recovered or read by somebody new, then bookie by bookie."""
    history = cluster.history
    assert last.ledger is not None
    last.detaching = True
    ledgers = [ledger for ledger in history.ledgers.values() if not ledger.deleting]
    before = history.recoveries
    for ledger in ledgers:
        cluster.launch("reread", recover(cluster.context, ledger, "the second reading"))
    deadline = cluster.loop.time() + CONVERGED_WITHIN_S
    while any(name.startswith("reread") for name in cluster.clients):
        await asyncio.sleep(0.1)
        if cluster.loop.time() > deadline:
            raise Violation(f"ledgers cannot be read again: {[ledger.ledger_id for ledger in ledgers]}")
    assert history.recoveries == before + len(ledgers)
    for machine in cluster.machines:
        if machine.bookie is not None and cluster.loop.rng.random() < 0.3:
            await machine.bookie.collector.collect()
    for ledger in ledgers:
        await check_replicas(cluster, ledger)
    for ledger in history.ledgers.values():
        if ledger.deleting and await cluster.metadata.truth.get(ledger_path(ledger.ledger_id)) is not None:
            raise Violation(f"ledger {ledger.ledger_id} was not deleted")


async def check_replicas(cluster: Cluster, ledger: LedgerHistory) -> None:
    """All that any bookie answers is the same, and acknowledged entries stand on Qa bookies of their ensembles."""
    node = await cluster.metadata.truth.get(ledger_path(ledger.ledger_id))
    assert node is not None, ledger.ledger_id
    metadata = LedgerMetadata.decode(node.value, ledger.ledger_id)
    copies: dict[int, list[str]] = {}
    for machine in cluster.machines:
        for entry_id in range(len(ledger.sent)):
            entry = await _copy(machine, ledger, entry_id)
            if entry is not None:
                cluster.history.read(ledger, entry_id, entry, machine.name)
                copies.setdefault(entry_id, []).append(machine.name)
    excused = [machine.name for machine in cluster.machines if machine.damaged]
    for entry_id in range(metadata.last_entry + 1):
        bookies = metadata.ensemble_of(entry_id).bookies
        write_set = [bookies[position] for position in metadata.striping.write_set(entry_id)]
        have = [name for name in write_set if name in copies.get(entry_id, ()) or name in excused]
        if len(have) < ledger.ack_quorum:
            raise Violation(
                f"ledger {ledger.ledger_id}: entry {entry_id} should stand on {ledger.ack_quorum} of {write_set}, "
                f"and stands on {copies.get(entry_id, [])}"
            )


async def _copy(machine: Machine, ledger: LedgerHistory, entry_id: int) -> bytes | None:
    if machine.bookie is None:
        return None
    try:
        entries, _ = await machine.bookie.read(ledger.ledger_id, entry_id, entry_id)
    except EntryNotFound:
        return None
    except EntryDamaged:
        if not machine.damaged:
            raise
        return None
    except (LedgerNotFound, MagnetarError):
        if not machine.damaged:
            raise
        return None
    return bytes(entries[0])


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    loop = SimLoop(seed, trace=trace, limit_seconds=300.0, whole_milliseconds=bool(seed % 2))
    cluster = Cluster(loop, draw(loop.rng))
    trace.record("plan", cluster.plan)

    async def main() -> None:
        cluster.start()
        await asyncio.sleep(0.3)
        chains = [loop.create_task(cluster.chain(name)) for name in "abc"[: cluster.plan.chains]]
        await cluster.storm()
        cluster.heal()
        await asyncio.wait([loop.create_task(asyncio.sleep(CALM_S)), *chains])
        for chain in chains:
            chain.result()
        cluster.end_of_faults()
        last = await converge(cluster)
        await check_hung_bookie(cluster)
        await check_memory(cluster)
        await check_idle_ledger(cluster, last)
        await check_everything(cluster, last)
        counts = cluster.history.counts()
        if counts["acknowledged"] < MINIMUM_ACKNOWLEDGED:
            raise Violation(f"too little happened: {counts}")

    try:
        loop.run(main())
    finally:
        loop.close()
    return {**cluster.history.counts(), "virtual_seconds": int(loop.time())}
