"""Pulsar's own protocol: its frames to calls on the broker, receipts and deliveries to its frames."""
