"""What the ledger scenario is made of: machines with bookies, a metadata service, clients, and what must hold."""
