"""The decisions of the ZooKeeper store: events and `now` in, instructions out."""
