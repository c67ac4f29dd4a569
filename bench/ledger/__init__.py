"""The ledger client against real bookies: appends, reads and recovery by ensemble size and quorums."""
