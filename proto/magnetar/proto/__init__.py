"""Ids, errors, frames, commands, batches and entries: pure functions over bytes, without I/O or clock."""
