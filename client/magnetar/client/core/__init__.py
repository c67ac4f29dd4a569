"""What decides, without I/O."""
