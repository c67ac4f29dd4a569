"""Large buffers come out of the heap of a daemon: counted by the mappings that the kernel is asked for."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.real


PROGRAM = """
import resource, sys
from magnetar.runtime.allocator import keep_large_buffers
if sys.argv[1] == "kept":
    assert keep_large_buffers()
def touch():
    [bytearray(4 << 20) for _ in range(6)]  # as a daemon that serves a few reads at a time
touch(), touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_large_buffers_are_not_mapped_anew_each_time() -> None:
    def faults(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert faults("kept") < 1000
    assert faults("as it is") > 10_000, "without it there is nothing to mend: drop it"
