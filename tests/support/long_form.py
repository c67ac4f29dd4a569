"""`LONG=1`: a test plays its long form; `LONG=10`: ten times that, `LONG=0.1`: a tenth. Else the short form of `make test`.

    LONG=1 pytest tests/crash/test_kill.py      # 50 kills instead of 4

`make crash`, `make spark` and `make long` set it.
"""

from __future__ import annotations

import os

import pytest

__all__ = ["FACTOR", "LONG", "long_form", "times"]

FACTOR = float(os.environ.get("LONG") or 0)
LONG = FACTOR > 0

long_form = pytest.mark.skipif(
    not LONG, reason="a long form: LONG=1, as `make crash` and `make spark` set it"
)


def times(short: int, long: int) -> int:
    """How often: `short` in `make test`, else FACTOR times `long`, and at least once."""
    return max(1, round(FACTOR * long)) if LONG else short
