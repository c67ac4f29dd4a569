"""What all commands share: options, the loop and the exit codes, tables, progress."""
