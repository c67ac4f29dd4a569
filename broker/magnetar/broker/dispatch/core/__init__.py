"""What dispatch decides, without I/O."""
