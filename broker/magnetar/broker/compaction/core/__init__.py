"""Decisions of compaction: which messages are left, how they are stored, where each stands. No I/O."""
