"""What a cursor decides, without I/O: ranges of messages, the mark-delete position and what lies beyond it."""
