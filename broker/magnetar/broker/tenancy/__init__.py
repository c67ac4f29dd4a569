"""Clusters, tenants and namespaces: what there is, who may make a topic, deletion, what nobody uses any more."""
