"""Ledger client: write and read handles, quorum, ensemble change, recovery, placement."""
