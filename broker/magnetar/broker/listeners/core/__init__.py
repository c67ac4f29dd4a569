"""What listeners of every protocol decide alike, without I/O."""
