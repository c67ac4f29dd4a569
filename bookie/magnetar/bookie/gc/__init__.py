"""Garbage collection: deleted ledgers, logs without live ledgers, compaction.

`decisions` says what to do with which log, `collector` does a round of it, `compactor` copies what is alive, `deletion`
writes tombstones, `existing_ledgers` asks metadata, `leftovers` drops what metadata gives to other bookies,
`unknown_ledgers` finds what is complete again after a loss.
"""
