"""Broker: managed ledgers, cursors, topics, subscriptions, dispatch, and the listener of the native protocol."""

from .broker import Broker
from .listener import ClientConnection, listener
from .settings import BrokerSettings
from .topic import Topic

__all__ = ["Broker", "BrokerSettings", "ClientConnection", "Topic", "listener"]
