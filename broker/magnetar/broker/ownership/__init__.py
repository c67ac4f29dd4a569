"""Which broker of a cluster serves which topics: bundles, their owners, look-ups and transfers (broker/CLUSTER.md)."""
