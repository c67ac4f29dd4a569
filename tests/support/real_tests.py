"""Tests that start processes carry the marker `real`; a test that starts one without it fails.

A process runs when the machine has a core for it, so such a test may fail with nothing wrong, and `support.second_try` gives
it another go. Every other test decides the same each time, and never gets one. What a fixture starts counts for all tests
that use it, whichever of them came first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

from support.forked_commands import FORKED

__all__ = ["RealTests", "is_real"]

AUDITED = frozenset(
    (
        "subprocess.Popen",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "os.exec",
        FORKED,
    )
)


def is_real(item: pytest.Item) -> bool:
    """True for a test that says that it starts processes."""
    return item.get_closest_marker("real") is not None


class RealTests:
    """A plugin of pytest, one in each worker."""

    def __init__(self) -> None:
        self._started: list[str] = []  # since the last look
        self._by_fixture: dict[Any, str] = {}  # fixture -> what it started; a FixtureDef of pytest
        self._refused: pytest.Item | None = None  # the last test that failed here
        sys.addaudithook(self._audit)
        # uvloop forks in C, without an event; it calls what is to run before a fork.
        os.register_at_fork(before=lambda: self._started.append("fork"))

    def _audit(self, event: str, details: tuple[Any, ...]) -> None:
        if event in AUDITED:
            self._started.append(f"{event} {str(details[:2])[:200]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Remember for later tests what a shared fixture starts; one of a single test starts it again for the next."""
        before = len(self._started)
        try:
            return (yield)
        finally:
            if len(self._started) > before and fixturedef.scope != "function":
                self._by_fixture[fixturedef] = f"fixture {fixturedef.argname}: {self._started[before]}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """See the module docstring."""
        self._started.clear()
        yield
        self._look(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """See the module docstring."""
        yield
        self._look(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, None, None]:
        """See the module docstring. The last test of a worker also ends what other tests have used."""
        yield
        if nextitem is not None:
            self._look(item)

    def _look(self, item: pytest.Item) -> None:
        started, self._started[:] = self._started[:], ()
        if is_real(item) or item is self._refused:
            return
        if isinstance(item, pytest.Function):
            used = item._request._fixture_defs.values()
            started += [self._by_fixture[one] for one in used if one in self._by_fixture]
        if started:
            self._refused = item
            pytest.fail(
                f"it starts a process and is not marked `@pytest.mark.real`: {started[0]}", pytrace=False
            )
