"""Decisions about where bundles live, as pure state over numbers: no clock, no chance, no store."""
