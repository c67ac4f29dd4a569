"""Sans-I/O cores of the ledger protocol: events in, instructions out, no clock, chance, socket or loop.

`quorum` is the arithmetic, `metadata` the record, `writer` and `recovery` the two machines.
"""
