"""Topics: the registry that loads them, one topic with its producers, coalescing, receipts and maintenance."""
