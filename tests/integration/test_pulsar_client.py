"""Pulsar's Python client, unchanged, sees of a service what it saw of a real Pulsar: a short form of `make test-pulsar`."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("pulsar", reason="there is no pulsar-client for this Python")

from pulsar_clients.program import SHORT
from pulsar_clients.run import clients, judged, magnetar, report, saw


@pytest.mark.real
async def test_it_sees_what_it_saw_of_a_pulsar(tmp_path: Path) -> None:
    client = clients("")[0]
    with magnetar(tmp_path / "data") as (url, http):
        both = await judged(client.name, partial(saw, client), url, http, tmp_path / "log", sorted(SHORT))
    text, unexplained = report(client.name, *both, Counter())
    assert not unexplained, text
