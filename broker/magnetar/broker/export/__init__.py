"""Topics as tables, the broker's side: which ledgers a topic has, leases on them, staged ledgers and their attachment."""
