"""Deterministic ledger machines: events and now in, instructions out; never awaits."""
