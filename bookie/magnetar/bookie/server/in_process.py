"""A bookie for a ledger client of the same process: its adds are called, its requests answered as over TCP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magnetar.proto.commands import Command, WaitLastConfirmed

from ..engine import Bookie
from .requests import answer_long_poll, perform, wait_for_last_confirmed


class InProcessBookie:
    """What `ledger.local_bookie.LocalBookie` asks for; the bookie is the caller's."""

    def __init__(self, bookie: Bookie) -> None:
        self.add = bookie.add
        self.request_force = bookie.request_force
        self.on_accepting = bookie.on_accepting
        self._bookie = bookie

    @property
    def accepting(self) -> bool:
        return self._bookie.adds.accepting

    @property
    def waits_for_room(self) -> bool:
        return self._bookie.waits_for_room

    async def answer(self, command: Command) -> tuple[Any, Sequence[bytes]]:
        if isinstance(command, WaitLastConfirmed):
            result = await wait_for_last_confirmed(self._bookie, command)
            answer = await answer_long_poll(self._bookie, 0, command, result)
        else:
            answer = await perform(self._bookie, 0, command)
        payload = answer.payload
        return answer.result, (payload,) if isinstance(payload, bytes) else payload
