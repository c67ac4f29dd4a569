"""One module per scenario; each has `play(seed, trace)` and `EXPECTED_FAULTS`."""
