"""Process kit: framed server and connection, clock, settings, logs, metrics, lifecycle, files."""
