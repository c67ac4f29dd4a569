"""Benchmarks: they print tables and write JSON under bench/out; no test asserts what they measure."""

import sys
from pathlib import Path

# Some of the kit of the tests is used here as well (`support`).
sys.path.append(str(Path(__file__).parents[1] / "tests"))
