"""The sockets of this process, as the system counts them: who closes one is not asked whether it is closed."""

import contextlib
import os

import pytest

_DESCRIPTORS = "/proc/self/fd"
counts_sockets = pytest.mark.skipif(
    not os.path.isdir(_DESCRIPTORS), reason="counts sockets where Linux lists them"
)


def open_sockets() -> set[str]:
    """A name for each, which another socket may have once it is closed."""
    names: set[str] = set()
    for descriptor in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            names.add(os.readlink(f"{_DESCRIPTORS}/{descriptor}"))
    return {name for name in names if name.startswith("socket:")}
