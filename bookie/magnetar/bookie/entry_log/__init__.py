"""Entry logs: the files that hold entries for good. A flush appends to them; afterwards they are only read.

A log is never appended to by a later start: a start writes to a new one. Bit rot is EntryDamaged, never "no such entry"
(rule 8).
"""
