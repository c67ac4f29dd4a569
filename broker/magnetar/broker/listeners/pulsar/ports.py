"""What producers and consumers of a connection use of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from google.protobuf.message import Message

from magnetar.proto.errors import FrameTooLarge
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.commands import encode
from magnetar.proto.pulsar.frames import FRAME_OVERHEAD_BYTES
from magnetar.runtime.connection import Piece

from ...dispatch.core.consumer import Peer
from ...service.operations import Caller
from ..backpressure import Pausable


def metadata_of(command: wire.CommandProducer | wire.CommandSubscribe) -> dict[str, str]:
    """What a program noted of its producer or consumer: figures show 100 of them, and 1,000 letters of each."""
    return {one.key[:1_000]: one.value[:1_000] for one in command.metadata[:100]}


class Link(Peer, Caller, Pausable, Protocol):
    """A connection on which Pulsar's protocol is spoken, once its handshake is done (`protocol.PulsarProtocol`)."""

    @property
    def protocol_version(self) -> int:
        """That both sides speak, at most 21."""

    @property
    def max_message_bytes(self) -> int:
        """What CONNECTED named: no frame to the client may be larger than this and FRAME_OVERHEAD_BYTES of its own."""

    def write(self, pieces: Sequence[Piece], size: int) -> None:
        """Frames, or parts of one, of `size` bytes together. Buffers must not change afterwards. Dropped when closed."""

    def send(self, frames: bytes) -> None:
        """The same of encoded frames."""


def frame_of(answer: Message, link: Link) -> bytes:
    """Raises FrameTooLarge for one that the client would close its connection for, as a list of topics may be."""
    frame = encode(answer)
    if len(frame) > link.max_message_bytes + FRAME_OVERHEAD_BYTES:
        raise FrameTooLarge(
            f"the answer has {len(frame)} bytes, more than the {link.max_message_bytes} of a message"
        )
    return frame
