"""What the broker decides, without I/O: ranges of messages, acknowledgement state, how an entry is cut for a consumer."""
