"""Benchmarks: they print tables and write JSON under bench/out; no test asserts what they measure."""
