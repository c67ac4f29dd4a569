"""The scenarios; importing them registers them."""

from pulsar_clients.scenarios import (
    acknowledging,
    administered,
    batches,
    connections,
    consumers,
    encryption,
    partitions,
    producers,
    readers,
    schemas,
    subscriptions,
    topics,
)

__all__ = [
    "acknowledging",
    "administered",
    "batches",
    "connections",
    "consumers",
    "encryption",
    "partitions",
    "producers",
    "readers",
    "schemas",
    "subscriptions",
    "topics",
]
