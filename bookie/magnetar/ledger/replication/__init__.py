"""Self-repair: the auditor finds ledgers that lack copies, workers copy what is missing, and damaged copies are healed.

`AutoRecovery` is both for one process. The decisions are sans-I/O: `core.audit` and `core.repair`. What is to be repaired,
and who does it, stands in the metadata store: `queue`, `cluster_watch`, and `metadata.damage`. `leftovers` is the other end:
how a bookie drops copies that no record names any more.
"""
