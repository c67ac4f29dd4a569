"""Storage daemon: journal, caches, entry log, index, garbage collection, server."""
