"""The decisions of self-repair, without I/O: events and `now` in, instructions out."""
