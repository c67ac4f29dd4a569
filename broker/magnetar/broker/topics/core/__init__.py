"""Decisions about the producers of a topic, without I/O."""
