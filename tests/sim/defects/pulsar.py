"""Defects of the listener of Pulsar's protocol, for the scenarios `mixed` and `mixed_once`."""

from __future__ import annotations

from typing import Any

from magnetar.broker.listeners.pulsar import consumers as consumers_module
from magnetar.broker.listeners.pulsar import producers as producers_module
from magnetar.broker.topics.core.deduplication import Pushed
from magnetar.proto.batch_extensions import BatchExtensions
from sim.defects.registry import mixed_defect, mixed_once_defect
from sim.pulsar import CheckedConsumer, CheckedProducer

consumers: Any = consumers_module
producers: Any = producers_module
consumer: Any = CheckedConsumer
producer: Any = CheckedProducer


@mixed_defect
def receipts_out_of_order() -> None:
    """Trap 2: of several receipts the last one is sent first."""
    send = producers.send_receipts
    producers.send_receipts = lambda producer_id, rows: send(producer_id, list(rows)[::-1])


@mixed_defect
def ack_of_a_batch_is_one_of_its_first_message() -> None:
    """An acknowledgement without ack set means the whole batch."""
    consumers.end_of_batch = lambda borders, index: index + 1


@mixed_defect
def seek_without_close_consumer() -> None:
    """Trap 1: what clients hold is stale, and their permits are lost."""
    consumer.sought = lambda self: None


@mixed_defect
def redelivery_without_count() -> None:
    """What was nacked comes again as if for the first time."""
    redeliver = consumer.redeliver

    def uncounted(self: Any, command: Any) -> None:
        self._individual, individual = False, self._individual
        try:
            rows = (
                self._all_rows(command.message_ids, self._borders, acknowledged=False) if individual else []
            )
            self.opened.subscription.redeliver(self.opened.consumer, rows, counted=False)
        finally:
            self._individual = individual
        if not individual:
            redeliver(self, command)

    consumer.redeliver = uncounted


@mixed_defect
def epoch_is_not_echoed() -> None:
    """Behind a redelivery of everything clients drop what has the old epoch, or none."""
    messages_of = consumers.messages_of
    consumers.messages_of = lambda delivery, id, partition, epoch, *more, **how: messages_of(
        delivery, id, partition, None, *more, **how
    )


@mixed_defect
def ack_of_a_part_acknowledges_the_batch() -> None:
    """Ack sets are not looked at."""
    rows = consumer._rows

    def whole(self: Any, one: Any, known: Any, **how: Any) -> Any:
        one.ClearField("ack_set")
        return rows(self, one, known, **how)

    consumer._rows = whole


@mixed_defect
def unload_without_close_producer() -> None:
    """The client is not told that its producer is not open any more, and waits for receipts."""

    def silently(self: Any, error: Any) -> None:
        self._on_closed(self)
        self.hold("")

    producer.producer_closed = silently


@mixed_once_defect
def second_chunk_is_a_duplicate() -> None:
    """Trap 8: the chunks of a message share one sequence id."""
    take = Pushed.take
    Pushed.take = lambda self, first, last, chunk: take(self, first, last, None)  # type: ignore[method-assign]


@mixed_once_defect
def last_sequence_id_is_forgotten() -> None:
    """Of a batch the first sequence id counts, though its producer says which the last one is."""
    admit = producers.admit_pulsar

    def without(payloads: Any) -> Any:
        groups = admit(payloads)
        found = dict(groups.extensions or {})
        for at, first in enumerate(groups.sequence_ids):
            found[at] = found.get(at, BatchExtensions())._replace(last_sequence_id=first)
        return groups._replace(extensions=found)

    producers.admit_pulsar = without
