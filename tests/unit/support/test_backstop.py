"""A test that swallows the error of its time limit, as a loop that catches everything does, does not hold its worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]

# The hooks of the real one, which waits longer.
CONFTEST = f"""
import importlib.util

spec = importlib.util.spec_from_file_location("hooks", {str(TESTS / "conftest.py")!r})
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)
hooks.BACKSTOP_S = 0.2
hooks.BACKSTOP_EVERY_S = 0.05
globals().update((name, hook) for name, hook in vars(hooks).items() if name.startswith("pytest_"))
"""

STUCK = """
import ctypes
import time
import pytest

HOLDING_THE_GIL = ctypes.PyDLL(None).sleep

@pytest.mark.timeout(0.1)
def test_stuck():
    while True:
        try:
            SLEEP(600)
        except BaseException:
            pass
"""


@pytest.mark.real
@pytest.mark.parametrize("sleep", ["time.sleep", "HOLDING_THE_GIL"])
def test_a_synchronous_test_that_will_not_end_ends_its_process(tmp_path: Path, sleep: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {TESTS} {TESTS.parent}\nasyncio_mode = auto\ntimeout = 150\nmarkers = real: x\n"
    )
    (tmp_path / "test_it.py").write_text(STUCK.replace("SLEEP", sleep))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "in test_stuck" in done.stderr
