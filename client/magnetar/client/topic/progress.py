"""How a consumer keeps its place in the topic: at the broker (`Acknowledger`), or by itself (`ReadPosition`)."""

from __future__ import annotations

from ..connection.broker_connection import BrokerConnection
from ..messages import Delivery, Message
from ..options import WireStart


class Progress:
    """What a consumer tells and asks, in the order of its life. Without more it does nothing."""

    def start(self) -> WireStart:
        """Where to subscribe (again)."""
        raise NotImplementedError

    async def subscribed(self, connection: BrokerConnection) -> None:
        """The broker knows the consumer, which has no permits yet."""

    def opened(self, delivery: Delivery) -> None:
        """A delivery is about to be handed out; its flags can still be set."""

    def handed_out(self, last: Message) -> None:
        """`last` and everything before it was given to the user."""

    def before_seek(self) -> None:
        """The position is going to move, if the broker agrees."""

    async def moved_to(self, start: WireStart) -> None:
        """A seek succeeded."""

    def detached(self) -> None:
        """No connection any more."""

    async def settle(self) -> None:
        """Waits for what is pending, before the consumer closes."""

    def end(self) -> None:
        """The consumer closes now."""
