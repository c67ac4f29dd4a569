"""The public names of magnetar.broker."""

from .listeners.native.connection import ClientConnection, listener
from .settings import BrokerSettings
from .topics.registry import Broker
from .topics.topic import Topic

__all__ = ["Broker", "BrokerSettings", "ClientConnection", "Topic", "listener"]
