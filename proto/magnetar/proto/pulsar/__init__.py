"""Pulsar's binary protocol: bytes to values and back, without I/O. Nothing of it is imported before the first connection."""
