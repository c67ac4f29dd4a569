"""Breadth-first model check of the ledger protocol's cores (scorecard 6)."""
