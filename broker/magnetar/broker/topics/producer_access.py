"""The shell of `core.producers`: carries out what a claim is told to do first, until it has its session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from magnetar.proto.errors import ProducerBusy
from magnetar.runtime.tasks import wait_at_most

from .core.producers import (
    Ask,
    Claim,
    ProducerPort,
    Producers,
    ProducerSession,
    Queued,
    StoreEpoch,
    Wait,
)
from .probing import probe


async def let_in(
    producers: Producers,
    claim: Claim,
    new_port: Callable[[int], ProducerPort],
    store_epoch: Callable[[], Awaitable[int]],
    ready: Callable[[], Awaitable[None]],
) -> ProducerSession:
    """The claim's session. Nothing of the claim is left if this is cancelled, or raises as `Producers.open`.

    `store_epoch` makes the topic's next epoch durable and returns it; `ready` raises while nobody may be let in. A claim
    that waits is told for whom, each time when that is somebody else.
    """
    loop, told = asyncio.get_running_loop(), ""
    try:
        while True:
            await ready()  # anew after each wait: the session is made with the answer
            match producers.open(claim, new_port, loop.time()):
                case Ask(sessions):
                    newcomer = new_port(claim.epoch).peer
                    await probe([session.port.peer for session in sessions], newcomer)
                case Wait(session):
                    drained: asyncio.Future[None] = loop.create_future()
                    session.when_drained.append(partial(drained.set_result, None))
                    await asyncio.wait([drained], timeout=producers.drain_timeout_ms / 1000)
                case Queued(reason, until):
                    if reason != told:
                        told = reason
                        new_port(claim.epoch).send_delayed(ProducerBusy(reason))
                    turn = asyncio.Event()
                    claim.wake = turn.set
                    await wait_at_most(turn, None if until is None else max(until - loop.time(), 0.0))
                case StoreEpoch():
                    producers.epoch_stored(claim, await store_epoch())
                case session:
                    return session
    except BaseException:
        producers.withdraw(claim)
        raise
