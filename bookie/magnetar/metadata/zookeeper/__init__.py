"""The metadata store on Apache ZooKeeper, over aiozk's records and a session layer of our own."""

from .address import ZooKeeperAddress, parse_address
from .store import ZooKeeperMetadataStore, ZooKeeperSettings, open_zookeeper_store

__all__ = [
    "ZooKeeperAddress",
    "ZooKeeperMetadataStore",
    "ZooKeeperSettings",
    "open_zookeeper_store",
    "parse_address",
]
