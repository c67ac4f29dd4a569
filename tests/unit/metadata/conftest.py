"""The contract of the metadata store is tested on a real ZooKeeper, too."""

from support.zookeeper import zookeeper

__all__ = ["zookeeper"]
