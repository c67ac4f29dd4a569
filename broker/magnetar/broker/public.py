"""The public names of magnetar.broker."""

from .listeners.native.connection import ClientConnection, listener
from .listeners.pulsar.listener import start_pulsar_listener
from .settings import BrokerSettings
from .topics.registry import Broker
from .topics.topic import Topic

__all__ = ["Broker", "BrokerSettings", "ClientConnection", "Topic", "listener", "start_pulsar_listener"]
