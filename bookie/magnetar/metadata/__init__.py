"""MetadataStore: the interface and its embedded, ZooKeeper and simulated implementations."""
