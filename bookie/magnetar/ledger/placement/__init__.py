"""Where new ledgers and replacements go.

`policy` chooses from the bookies that it is given. `chooser` asks it on behalf of the ledger client: it knows which bookies
are bad, which belong to the group of a ledger, and degrading. What is decided without chance is in `ledger.core`:
`arrangement`, `degrade`, `suspicion`.
"""
