"""`magnetar cluster drain`: marks brokers and bookies, and shows how far they have handed over what they have."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from magnetar.runtime.quantities import counted

from ..terminal.command import command
from ..terminal.progress import ProgressMeter
from ..terminal.session import fail
from ..wiring.metadata import system_rng
from ..wiring.settings import SettingSources, service_settings
from .options import STORE, Kind

if TYPE_CHECKING:
    from magnetar.broker.ownership.draining import ClusterMember, Draining
    from magnetar.broker.ownership.ownership import DrainState
    from magnetar.metadata import MetadataStore

drain_app = typer.Typer()

_POLL_S = 0.2
# The records of all ledgers are looked through: for a tenth of the time at most.
_PAUSE_PER_LOOK = 9.0
_LINE_S = 10.0


@command(drain_app, "drain", source=STORE, json=None)
async def drain(
    store: MetadataStore,
    name: Annotated[
        str, typer.Argument(help="A broker or a bookie, as status shows it.", metavar="[NAME]")
    ] = "",
    zone: Annotated[
        str, typer.Option("--zone", help="Instead: all brokers and bookies of a zone.", metavar="ZONE")
    ] = "",
    kind: Kind = "",
    undo: Annotated[
        bool, typer.Option("--undo", help="Take it back; what was moved stays where it is.")
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait", min=0, help="Return after so long; without it when all has moved.", metavar="SECONDS"
        ),
    ] = None,
) -> None:
    """Move all that a broker or a bookie has to the others, so that it can be stopped; it gets nothing new until --undo.

    Ctrl-C ends the command alone: the same again follows what is under way, and --undo takes it back.
    """
    from magnetar.broker.ownership.cluster_view import ClusterView
    from magnetar.broker.ownership.draining import Draining, choose
    from magnetar.runtime.clock import SystemClock

    settings = service_settings(SettingSources.of_process({}))
    view = ClusterView(store, settings.broker.default_bundles, lambda: None)
    try:
        draining = Draining(store, view, settings.balance, settings.ledger, system_rng(), SystemClock())
        chosen = choose(await draining.members(), name, zone=zone, kind=kind)
        if undo:
            await draining.undo(chosen)
            _say_undone(chosen)
            return
        await draining.begin(chosen)
        try:
            await _follow(draining, chosen, wait)
        except asyncio.CancelledError:
            print("it goes on without this command: the same again follows it, --undo takes it back")
            raise
    finally:
        await view.close()


def _say_undone(chosen: list[ClusterMember]) -> None:
    for member in chosen:
        if member.drained:
            print(f"{member.kind} {member.name} is not drained any more")
    if not any(member.drained for member in chosen):
        print(f"not drained before: {_listed(chosen)}")


def _listed(chosen: list[ClusterMember]) -> str:
    return ", ".join(f"{member.kind} {member.name}" for member in chosen)


async def _follow(draining: Draining, chosen: list[ClusterMember], wait_s: float | None) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    state = await draining.state(chosen)
    print(f"draining {_listed(chosen)}: {_left(state)}", flush=True)
    total, said_at = state.bundles + state.ledgers, began
    with ProgressMeter("moved", total=total, unit="bundles and ledgers") as meter:
        took_s = loop.time() - began
        while not state.over and (wait_s is None or loop.time() - began < wait_s):
            await asyncio.sleep(max(_POLL_S, took_s * _PAUSE_PER_LOOK))
            looked = loop.time()
            state = await draining.state(chosen)
            took_s = loop.time() - looked
            meter.advance(total - state.bundles - state.ledgers - meter.done)
            marked = {(one.kind, one.name) for one in await draining.members() if one.drained}
            if undone := [one for one in chosen if (one.kind, one.name) not in marked]:
                fail(f"somebody has taken the drain back: {_listed(undone)}")
            if looked - said_at >= _LINE_S and not sys.stderr.isatty():  # where no bar is shown
                print(_left(state), flush=True)
                said_at = looked
    for ledger_id, note in state.notes.items():
        print(f"ledger {ledger_id}: {note}")
    if not state.over and wait_s:
        fail(f"{_left(state)}; it goes on: the same again follows it, --undo takes it back")
    if state.over:
        print(f"all has moved after {loop.time() - began:.1f} s: {_listed(chosen)} can be stopped")
        if state.bookies:
            print(
                f"a bookie that does not come back: magnetar cluster remove {state.bookies[0]}, once it is stopped"
            )


def _left(state: DrainState) -> str:
    parts = []
    if state.brokers:
        parts.append(f"{counted(state.bundles, 'bundle')} to hand over")
    if state.bookies:
        text = f"{counted(state.ledgers, 'ledger')} to copy"
        if state.open_ledgers:
            text += f" ({state.open_ledgers:,} open: their writers leave them within minutes)"
        parts.append(text)
    return ", ".join(parts)
