"""The managed ledger: a topic as a list of ledgers; append, read, trim, edit; the tail cache."""
