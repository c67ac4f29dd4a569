"""Broker: managed ledgers, cursors, topics, subscriptions, dispatch, and the listener of the native protocol."""

from .listeners.native.connection import ClientConnection, listener
from .settings import BrokerSettings
from .topics.registry import Broker
from .topics.topic import Topic

__all__ = ["Broker", "BrokerSettings", "ClientConnection", "Topic", "listener"]
