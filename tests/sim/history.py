"""What the clients of a simulated service saw, and the rules that it must obey (CORRECTNESS.md, "Invariants").

Messages are named (producer, number); numbers count up from 0 in the order in which the producer sent them. The history
knows nothing of loops or sockets: clients tell it what happened, `now` is virtual seconds.
"""

from __future__ import annotations

from magnetar.client.chunked_id import last_place
from magnetar.proto.ids import MessageId
from sim.deliveries import Name, Subscription, Violation, next_in_order


def value_of(name: Name, padding: int) -> bytes:
    """The bytes of a message."""
    return b"%s/%d/" % (name[0].encode(), name[1]) + b"." * padding


def name_of(value: bytes) -> Name:
    """Reads `value_of`."""
    producer, number, _ = value.split(b"/", 2)
    return producer.decode(), int(number)


class History:
    """All of it. Methods raise Violation at once; `check_end` looks at the whole."""

    def __init__(self, *, trimming: bool = False) -> None:
        # Nothing holds the start of the topic: what every subscription has acknowledged may be trimmed for a reader.
        self.trimming = trimming
        self.sent: dict[str, int] = {}  # producer -> how many
        self.confirmed: dict[Name, MessageId] = {}
        self.failed: dict[Name, str] = {}  # sends whose outcome the client does not know
        self.subscriptions: dict[str, Subscription] = {}
        self.tail: dict[MessageId, Name] = {}  # what the tail reader handed out
        self._tail_last: MessageId | None = None
        self._tail_numbers: dict[Name, int] = {}

    # --- producing -------------------------------------------------------------------------------------------------

    def send(self, producer: str) -> Name:
        """The name of the next message."""
        number = self.sent.get(producer, 0)
        self.sent[producer] = number + 1
        return producer, number

    def confirm(self, name: Name, message_id: MessageId) -> None:
        """The producer got the receipt of the message."""
        self.confirmed[name] = message_id

    # --- reading ---------------------------------------------------------------------------------------------------

    def tailed(self, message_id: MessageId, value: bytes) -> None:
        """The tail reader handed out a message: ids rise, and first occurrences are in order."""
        name = name_of(value)
        place = last_place(message_id)  # a message in chunks comes with the last of them
        if self._tail_last is not None and place <= self._tail_last:
            raise Violation(f"the reader got {message_id} after {self._tail_last}")
        self._tail_last = place
        self.tail[message_id] = name
        self._check_order(self._tail_numbers, name, f"the reader at {message_id}")

    def crashed(self, now: float) -> None:
        """The service died."""
        for subscription in self.subscriptions.values():
            subscription.crashed(now)

    def _check_order(self, last: dict[Name, int], name: Name, where: str) -> None:
        missing = [one for one in next_in_order(last, name, 1) if one not in self.failed]
        if missing and not self.trimming:
            raise Violation(
                f"{where} got {name} as first occurrence although {missing[:5]} did not come before it"
            )

    # --- the end -----------------------------------------------------------------------------------------------------

    def missing(self) -> dict[str, list[Name]]:
        """Confirmed messages that somebody still lacks, by who lacks them."""
        seen = set(self.tail.values())
        lacks = {"reader": [name for name in self.confirmed if name not in seen and not self.trimming]}
        for subscription in self.subscriptions.values():
            lacks[subscription.name] = subscription.lacks(self.confirmed)
        return {who: names for who, names in lacks.items() if names}

    def check_reread(self, entries: list[tuple[MessageId, bytes]]) -> None:
        """A reader that started from the beginning after everything: what is durable, in order, as confirmed."""
        last: dict[Name, int] = {}
        by_id: dict[MessageId, Name] = {}
        for message_id, value in entries:
            name = name_of(value)
            by_id[message_id] = name
            self._check_order(last, name, f"the second reading at {message_id}")
        first = min(by_id, default=MessageId(1 << 62, 0, 0)) if self.trimming else MessageId(0, 0, 0)
        for name, message_id in self.confirmed.items():
            if message_id >= first and by_id.get(message_id) != name:
                raise Violation(
                    f"lost: {name} was confirmed as {message_id}, which now holds {by_id.get(message_id)}"
                )
        for message_id, name in self.tail.items():
            if message_id >= first and by_id.get(message_id) != name:
                raise Violation(
                    f"the reader once got {name} at {message_id}, which now holds {by_id.get(message_id)}"
                )

    def counts(self) -> dict[str, int]:
        """Load and results of the run."""
        redelivered = sum(subscription.redeliveries for subscription in self.subscriptions.values())
        receipts = sum(len(subscription.receipts) for subscription in self.subscriptions.values())
        return {
            "sent": sum(self.sent.values()),
            "confirmed": len(self.confirmed),
            "failed_sends": len(self.failed),
            "tailed": len(self.tail),
            "duplicates": len(self.tail) - len(set(self.tail.values())),
            "redelivered": redelivered,
            "ack_receipts": receipts,
        }
