"""Seeded simulation: scenarios over tests/support/sim, and the runner that plays seeds in fresh processes."""
