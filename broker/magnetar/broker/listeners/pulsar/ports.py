"""What producers and consumers of a connection use of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from magnetar.proto.errors import MagnetarError

from ...dispatch.core.consumer import Peer
from ...service.broker import BrokerService
from ...service.operations import Caller
from ...service.results import ConsumerOpened

Piece = bytes | bytearray | memoryview


class Link(Peer, Caller, Protocol):
    """A connection on which Pulsar's protocol is spoken, once its handshake is done (`protocol.PulsarProtocol`)."""

    @property
    def client_version(self) -> str:
        """What the client calls itself, for example "Pulsar-CPP-v3.7.2" or "Pulsar-Java-v4.0.6"."""

    @property
    def protocol_version(self) -> int:
        """That both sides speak, at most 21."""

    @property
    def max_message_bytes(self) -> int:
        """What CONNECTED named: no frame to the client may be larger than this and FRAME_OVERHEAD_BYTES of its own."""

    @property
    def writable(self) -> bool:
        """False between high and low water."""

    def write(self, pieces: Sequence[Piece], size: int) -> None:
        """Frames, or parts of one, of `size` bytes together. Buffers must not change afterwards. Dropped when closed."""

    def send(self, frames: bytes) -> None:
        """The same of encoded frames."""

    def answer_error(self, request_id: int, error: MagnetarError) -> None:
        """ERROR, always with a text."""

    def pause_reading(self, reason: str) -> None:
        """Until every reason is withdrawn."""

    def resume_reading(self, reason: str) -> None:
        """Withdraws a reason."""

    def close(self, error: MagnetarError | None = None) -> None:
        """Flushes, then closes."""


class ConsumerCalls(Protocol):
    """What the connection calls of a consumer (`consumers.Consumer`), which is a ConsumerPort as well.

    `consumers.Consumer(link, requests, command, on_ended)` is made for a CommandSubscribe before it is open; `opened` is set
    when it is. `consumers.subscribe_request(command)` is what it asks the service for. What these methods answer they send
    through the link.
    """

    consumer_id: int
    opened: ConsumerOpened

    def flow(self, command: Any) -> None:
        """FLOW."""

    def acknowledge(self, command: Any) -> None:
        """ACK, and ACK_RESPONSE if it has a request id."""

    def redeliver(self, command: Any) -> None:
        """REDELIVER_UNACKNOWLEDGED_MESSAGES."""

    async def seek(self, service: BrokerService, command: Any) -> None:
        """SEEK: every consumer of the subscription is closed when this returns, and the connection answers SUCCESS."""

    async def last_message_id(self, service: BrokerService, command: Any) -> bytes:
        """GET_LAST_MESSAGE_ID: the frame to answer with."""
