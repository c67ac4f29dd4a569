"""Defects of delayed messages (rule 29), for the scenario `delayed`."""

from __future__ import annotations

from typing import Any

from magnetar.broker.dispatch.core import dispatcher as dispatcher_module
from magnetar.broker.dispatch.core.delay_index import DelayIndex
from magnetar.broker.dispatch.core.dispatcher import DispatchCore
from magnetar.broker.topics.delays import TopicDelays
from sim.defects.deduplication import snapshot_without_its_position
from sim.defects.registry import delayed_defect

index: Any = DelayIndex
topic_delays: Any = TopicDelays
core: Any = DispatchCore
dispatcher: Any = dispatcher_module

delayed_defect(snapshot_without_its_position)


@delayed_defect
def early_after_a_restart() -> None:
    """What is delayed is handed out while the index is not read yet."""
    dispatcher.ENTRY_DELAYED = 0


@delayed_defect
def no_state_before_the_first() -> None:
    """The first delayed entry does not wait until the state is stored."""
    ready = topic_delays.ready
    topic_delays.ready = lambda self: ready(self) or True


@delayed_defect
def what_is_not_stored_is_forgotten() -> None:
    """The log behind the snapshot is not looked at."""
    topic_delays.replay = lambda self, *given: None


@delayed_defect
def changes_without_their_last_piece() -> None:
    """A change counts for rows that it does not have."""
    changes = topic_delays.changes
    topic_delays.changes = lambda self: list(changes(self))[1:]


@delayed_defect
def bucket_lost_at_a_roll_over() -> None:
    """One of those that are to be spread over narrower buckets when a second begins is lost."""
    spread = index._spread

    def lossy(self: Any, level: int) -> None:
        if level == 1 and len(self._spreading[1][1]) > 2:
            del self._spreading[1][1][0]
        spread(self, level)

    index._spread = lossy


@delayed_defect
def due_while_nobody_was_there_is_forgotten() -> None:
    """Only consumers that are there when a message is due get it."""
    released = core.released
    core.released = lambda self, runs: released(self, runs) if self.consumers else None


@delayed_defect
def sweeps_are_too_rare() -> None:
    """What is due waits until half a second is over."""
    policy = topic_delays._policy
    topic_delays._policy = lambda self, name: 500 if name.endswith("tick_ms") else policy(self, name)
