"""Topic compaction by key: the last message of each key, in a ledger of its own, read in place of the topic's beginning."""
