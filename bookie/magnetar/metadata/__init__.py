"""Metadata: what daemons must agree on, as versioned values behind one interface.

`store` is the interface; `embedded` keeps it in RocksDB for one machine, `zookeeper` on ZooKeeper's servers.
"""

from .store import Check, Create, Delete, MetadataStore, Operation, Put, Session, Versioned, Watch

# The stores are imported from their modules, so that a user of the interface does not load RocksDB.
__all__ = ["Check", "Create", "Delete", "MetadataStore", "Operation", "Put", "Session", "Versioned", "Watch"]
