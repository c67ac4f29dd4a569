"""Garbage collection: deleted ledgers, logs without live ledgers, compaction.

`decisions` says what to do with which log, `collector` does a round of it, `survey` finds out how much is alive, `compactor`
copies it, `existing_ledgers` asks metadata what was deleted, `assignments` what is this bookie's.
"""
