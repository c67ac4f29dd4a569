"""Defects of the end of a topic, for the scenario `terminated`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from magnetar.broker.dispatch.core.dispatcher import DispatchCore
from magnetar.broker.topics.topic import Topic
from sim.defects.registry import terminated_defect

topic: Any = Topic
core: Any = DispatchCore


@terminated_defect
def end_is_not_durable() -> None:
    """The next owner knows nothing of it, and takes more."""
    store_end = topic._store_end

    async def only_in_memory(self: Any) -> Any:
        ledgers = self.ledger.list

        async def changed(**fields: Any) -> None:
            for name, value in fields.items():
                setattr(ledgers.record, name, value)

        commit, ledgers.commit = ledgers.commit, changed
        try:
            return await store_end(self)
        finally:
            ledgers.commit = commit

    topic._store_end = only_in_memory


@terminated_defect
def what_is_queued_is_not_waited_for() -> None:
    """What producers have sent comes behind the message that is named as the last one."""

    async def at_once(self: Any) -> None: ...

    async def store_end(self: Any) -> bool:
        last = self.ledger.list.last_entry()
        await self.ledger.list.commit(terminated=True, last_message=None if last is None else (*last, 0))
        return True

    topic._until_drained, topic._store_end = at_once, store_end


@terminated_defect
def told_once_for_all() -> None:
    """Who gives back what it has, or goes back, is not told again."""
    tell = core._tell_end

    def once(self: Any, end: Any) -> None:
        told = [one for one in self.consumers if one.told_end is not None]
        for one in told:
            one.told_end = (one.epoch, one.redelivers)
        tell(self, end)

    core._tell_end = once


@terminated_defect
def told_beside_what_is_delayed() -> None:
    """Messages wait for their time when consumers are told that nothing comes any more."""
    tell = core._tell_end

    def careless(self: Any, end: Any) -> None:
        delays, self._delays = self._delays, SimpleNamespace(index=None, whole=True)
        try:
            tell(self, end)
        finally:
            self._delays = delays

    core._tell_end = careless
