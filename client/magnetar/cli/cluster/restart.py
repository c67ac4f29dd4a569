"""`magnetar cluster rolling-restart`: one daemon after another, or one machine or zone, each only while all others are well.

    wait until all is well ──> hand over ──> stop and start ──> registered anew ──> nothing waits for repair ──> the next
         every daemon registered and not stalled, no ledger in the queue of repairs, no ledger below its ack quorum

Daemon by daemon bookies come first, then brokers; a broker that gets SIGTERM hands over its topics by itself. What is
restarted together (`cluster_members`) is stopped at the same moment: its brokers are drained before, so that no topic is
moved while a bookie goes away. How a daemon is restarted is a command of the shell, in which {name}, {kind} (bookie or
broker), {host}, {port} and {zone} are replaced; a command that is the same for several of a group runs once. A command stops
a daemon by SIGTERM and returns when it has ended.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.proto.errors import InvalidArgument, ServiceNotReady
from magnetar.runtime.quantities import counted
from magnetar.runtime.timeouts import TimeLimit

from ..wiring.cluster_facts import ledgers_to_repair
from .members import Group, Member, obstacles, read_members, refusals

if TYPE_CHECKING:
    from magnetar.metadata import MetadataStore


# How a daemon is restarted under the supervisors that docs/deploy.md describes.
SUPERVISORS = {
    "systemd": ("ssh {host} sudo systemctl restart magnetar-{kind}",),
    "kubernetes": ("kubectl delete pod {name}",),
}
_PLACES = ("name", "kind", "host", "port", "zone")
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Commands:
    """Run one after the other, they restart a daemon. `ready` is tried until it succeeds; "": there is none."""

    restart: tuple[str, ...]
    ready: str = ""

    def __post_init__(self) -> None:
        """InvalidArgument when a command cannot be filled in."""
        example = Member("bookie", "bookie-1", "127.0.0.1", 3181, "", 0)
        for command in (*self.restart, self.ready):
            fill(command, example)

    def lines(self, group: Group) -> list[list[str]]:
        """Of all its daemons: what runs at the same time, then what comes after it, and so on."""
        return [
            list(dict.fromkeys(fill(command, member) for member in group.members)) for command in self.restart
        ]


def fill(command: str, member: Member) -> str:
    """A command for this daemon. InvalidArgument."""
    values = {name: shlex.quote(str(getattr(member, name))) for name in _PLACES}
    try:
        return command.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        places = ", ".join(f"{{{name}}}" for name in _PLACES)
        raise InvalidArgument(
            f"the command {command!r} cannot be filled in ({error}); it may have {places}, and {{{{ for a brace"
        ) from None


async def restart(
    store: MetadataStore,
    groups: Sequence[Group],
    commands: Commands,
    timeout_s: float,
    say: Callable[[str], None],
) -> None:
    """Restarts them in this order.

    Raises InvalidArgument, before anything is stopped, if a group may not be stopped together; ServiceNotReady at the first
    that does not come back, or while others are missing.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    expected = await read_members(store)
    if found := await refusals(store, expected, groups):
        raise InvalidArgument("; ".join(found))
    for number, group in enumerate(groups, 1):
        await _until_well(store, expected, group, timeout_s, f"{group} is not stopped")
        start = loop.time()
        async with _handed_over(store, group, timeout_s):
            handed_over = loop.time() - start
            for lines in commands.lines(group):
                await asyncio.gather(*(_run(line, timeout_s) for line in lines))
            restarted = loop.time() - start
            for member in group.members:
                await _until_back(store, member, commands, timeout_s)
        back = loop.time() - start
        what = f"{group} was restarted; the cluster is not well since"
        await _until_well(store, expected, None, timeout_s, what)
        well = loop.time() - start
        drained = f"handed over in {handed_over:.1f} s, " if len(group.members) > 1 else ""
        say(
            f"[{number}/{len(groups)}] {group.described}: {drained}restarted in {restarted:.1f} s, registered after "
            f"{back:.1f} s, all copies there after {well:.1f} s"
        )
    daemons = sum(len(group.members) for group in groups)
    say(f"{counted(daemons, 'daemon')} restarted in {loop.time() - began:.1f} s")


@asynccontextmanager
async def _handed_over(store: MetadataStore, group: Group, timeout_s: float) -> AsyncIterator[None]:
    """The brokers of a group own nothing, and get nothing until the block is left. A daemon alone sees to it itself."""
    from magnetar.metadata.drains import BROKER, mark_drained, unmark_drained

    brokers = [one for one in group.members if one.kind == BROKER] if len(group.members) > 1 else []
    ours = [one.name for one in brokers if await mark_drained(store, BROKER, one.name, one.zone)]
    try:
        names = [one.name for one in brokers]
        await _until_nothing_owned(store, names, timeout_s, f"{group} is not stopped")
        yield
    finally:
        await asyncio.gather(*(unmark_drained(store, BROKER, name) for name in ours))


async def _until_nothing_owned(
    store: MetadataStore, brokers: Sequence[str], timeout_s: float, otherwise: str
) -> None:
    from magnetar.broker.ownership.draining import bundles_of

    late = f"{', '.join(brokers)} did not hand over all topics in {timeout_s:g} s; the log of the broker says why"
    async with TimeLimit(timeout_s, lambda: ServiceNotReady(f"{otherwise}: {late}")):
        while await bundles_of(store, brokers):  # noqa: ASYNC110 - of metadata, once
            await asyncio.sleep(_POLL_S)


async def _until_well(
    store: MetadataStore, expected: Sequence[Member], group: Group | None, timeout_s: float, otherwise: str
) -> None:
    """`group`: that is to be stopped next."""
    found: list[str] = []

    def late() -> ServiceNotReady:
        return ServiceNotReady(
            f"{otherwise}: {'; '.join(found)}, for {timeout_s:g} s; mend that, then begin again (--only names the rest)"
        )

    async with TimeLimit(timeout_s, late):
        while True:
            members = await read_members(store)
            found = obstacles(members, expected, await ledgers_to_repair(store))
            if not found and group is not None:
                found = await refusals(store, members, [group])
            if not found:
                return
            await asyncio.sleep(_POLL_S)


async def _until_back(store: MetadataStore, member: Member, commands: Commands, timeout_s: float) -> None:
    late = f"{member} was restarted and is not ready after {timeout_s:g} s; look at its log. The others were left alone"
    async with TimeLimit(timeout_s, lambda: ServiceNotReady(late)):
        while not await _is_back(store, member, commands):  # noqa: ASYNC110 - a command cannot be watched
            await asyncio.sleep(_POLL_S)


async def _is_back(store: MetadataStore, member: Member, commands: Commands) -> bool:
    for now in await read_members(store):
        if (now.kind, now.name) == (member.kind, member.name):
            if now.run == member.run or now.trouble:
                return False
            return not commands.ready or await _exit_code(fill(commands.ready, member)) == 0
    return False


async def _run(command: str, timeout_s: float) -> None:
    late = f"`{command}` did not end within {timeout_s:g} s; nothing else was restarted"
    async with TimeLimit(timeout_s, lambda: ServiceNotReady(late)):
        code = await _exit_code(command)
    if code:
        raise ServiceNotReady(f"`{command}` ended with code {code}; nothing else was restarted")


async def _exit_code(command: str) -> int:
    process = await asyncio.create_subprocess_shell(command, stdin=asyncio.subprocess.DEVNULL)
    try:
        return await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
