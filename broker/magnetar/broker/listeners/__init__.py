"""Listeners: bytes of a protocol to typed calls and back, one folder a protocol."""
