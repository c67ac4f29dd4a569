"""Looks at what a broker sends: no receipt after another broker has taken the topic over (rules 23, 31).

Whoever takes a topic over has fenced its last ledger before it changes the topic's record. A receipt that is sent after
that change is one of a stale owner, unless it is of a duplicate.

Acknowledgements are kept apart, and cursors are taken over after the topic: their ledgers are fenced, their pointers then
written. What a former owner writes before that is found by the one that takes the cursor over; a receipt that it sends after
that is wrong, unless the acknowledgement changed nothing: what it names was durable, so the next owner has it. A broker
whose session is over sends none in either case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from magnetar.broker import Broker, ClientConnection
from magnetar.broker.cursors.cursor import Cursor
from magnetar.broker.service.broker import BrokerService
from magnetar.proto import commands as c
from magnetar.proto.errors import MagnetarError, TopicNotServed
from magnetar.proto.ids import TopicName
from sim.cluster.metadata import SESSION_S, ClusterMetadata
from sim.deliveries import Violation
from support.sim import SimProcess, current_process

# While the broker runs: who stands still, for as long as one storm may want, answers nobody. Two session timeouts, as
# `BundleOwnership.locate` waits for others, and what is under way then: some answers of the store that come late or never.
LONGEST_LOOKUP_S = 2 * SESSION_S + 4.0
_LOOKS_AGAIN_S = 0.1


class CheckedLink:
    """A connection's way out. `topics` of its producers; `acks`: requests that wait for a receipt, and of what."""

    def __init__(self, link: Any, metadata: ClusterMetadata, name: str) -> None:
        self._link = link
        self._metadata = metadata
        self._name = name
        self._receipts: dict[bytes, int] = {}  # header -> producer
        self.topics: dict[int, TopicName] = {}
        self.acks: dict[int, tuple[TopicName, str, Cursor]] = {}  # topic, subscription, cursor
        self.lookups: dict[int, str] = {}  # requests that are not answered, and the topic
        self.authorize = link.authorize
        self.pause_reading = link.pause_reading
        self.resume_reading = link.resume_reading
        self.close = link.close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    @property
    def writable(self) -> bool:
        """See Link."""
        writable: bool = self._link.writable
        return writable

    def send(self, header: bytes, payload: Any = b"") -> None:
        """See Link."""
        if payload and type(payload) is bytes:
            producer = self._receipts.get(header)
            if producer is None:
                command = c.decode_command(header)
                if isinstance(command, c.Receipt):
                    producer = self._receipts[header] = command.producer_id
            # A duplicate is receipted for its original, which is stored whoever says so: `sim.once` looks whether it is.
            if producer is not None and any(row[2] >= 0 for row in c.decode_rows(c.RECEIPT_ROW, payload)):
                self._check(self.topics[producer], "the receipts of a producer")
        self._link.send(header, payload)

    def answer(self, request_id: int, result: Any = None) -> None:
        """See Link."""
        self.lookups.pop(request_id, None)
        if (acknowledged := self.acks.pop(request_id, None)) is not None:
            topic, subscription, cursor = acknowledged
            metadata, name = self._metadata, self._name
            # Else it is clean: the receipt is given at once, without a write.
            written = cursor._dirty or cursor._task is not None
            if metadata.session_over(name) or (
                written and metadata.cursor_taken_from(name, topic, subscription)
            ):
                self._check(topic, "the receipt of an acknowledgement")
        self._link.answer(request_id, result)

    def answer_error(self, request_id: int, error: MagnetarError) -> None:
        """See Link."""
        self.acks.pop(request_id, None)
        self.lookups.pop(request_id, None)
        self._metadata.refusals += isinstance(error, TopicNotServed)
        self._link.answer_error(request_id, error)

    def _check(self, topic: TopicName, what: str) -> None:
        taker = self._metadata.taken_from(self._name, topic)
        if taker and not self._metadata.deceived(self._name):
            raise_outside(
                self._metadata,
                f"{self._name} sent {what} of {topic.name} after {taker} had taken the topic over",
            )


def raise_outside(metadata: ClusterMetadata, text: str) -> None:
    """Ends the run: what is raised within a broker might be caught there."""
    error = Violation(text)
    metadata.loop.call_exception_handler({"message": text, "exception": error})
    raise error


class CheckedConnection(ClientConnection):
    """Tells its link what the client asked for."""

    def __init__(self, service: BrokerService, metadata: ClusterMetadata, name: str) -> None:
        super().__init__(service)
        self._consumed: dict[int, tuple[TopicName, str]] = {}
        self._metadata, self._name = metadata, name
        self._checked: CheckedLink

    def connection_ready(self, connection: Any) -> None:
        """See ConnectionHandler."""
        self._checked = CheckedLink(connection, self._metadata, self._name)
        super().connection_ready(self._checked)

    def _command(self, command: c.Command, payload: bytes) -> None:
        if isinstance(command, c.CreateProducer):
            self._checked.topics[command.producer_id] = TopicName.parse(command.topic)
        elif isinstance(command, c.Subscribe):
            self._consumed[command.consumer_id] = TopicName.parse(command.topic), command.subscription
        elif isinstance(command, c.Ack) and command.request_id and command.consumer_id in self._consumed:
            if (opened := self._consumers.get(command.consumer_id)) is not None:
                topic, subscription = self._consumed[command.consumer_id]
                self._checked.acks[command.request_id] = topic, subscription, opened.subscription.cursor
        elif isinstance(command, c.Lookup):
            self._watch_lookup(command)
        try:
            super()._command(command, payload)
        except MagnetarError:
            self._checked.acks.pop(command.request_id, None)
            raise

    def _watch_lookup(self, command: c.Lookup) -> None:
        """It may be held until the session of a lost owner has ended, and not for ever."""
        request_id, lookups = command.request_id, self._checked.lookups
        lookups[request_id] = command.topic
        process = current_process()
        assert process is not None
        no_longer(
            self._metadata,
            process,
            LONGEST_LOOKUP_S,
            lambda: lookups.get(request_id) == command.topic and not self._closed,
            f"{self._name} has held a look-up of {command.topic} for {LONGEST_LOOKUP_S:g} s",
        )


def no_longer(
    metadata: ClusterMetadata, process: SimProcess, seconds: float, holds: Callable[[], bool], text: str
) -> None:
    """Ends the run with `text` if what `holds` now still holds when `process` has run for so many seconds more."""
    until = process.awake_s + seconds

    def look() -> None:
        if holds() and process.alive:
            if (rest := until - process.awake_s) > 0:  # it stood still meanwhile
                metadata.loop.call_outside(max(rest, _LOOKS_AGAIN_S), look)
            else:
                raise_outside(metadata, text)

    metadata.loop.call_outside(seconds, look)


def checked_listener(broker: Broker, metadata: ClusterMetadata, name: str) -> Callable[[], ClientConnection]:
    """See `magnetar.broker.listener`."""
    service = BrokerService(broker)
    return lambda: CheckedConnection(service, metadata, name)
