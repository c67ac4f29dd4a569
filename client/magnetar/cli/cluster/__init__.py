"""`magnetar cluster`: commands on the metadata that the daemons of a cluster share."""
