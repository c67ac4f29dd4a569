"""Broker: managed ledgers, cursors, topics, subscriptions, dispatch, ownership."""
