"""Checks of the production code that no off-the-shelf linter has: `PYTHONPATH=tests python -m lint`."""
