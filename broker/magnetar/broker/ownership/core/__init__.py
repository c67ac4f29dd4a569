"""Decisions about bundles: pure."""
