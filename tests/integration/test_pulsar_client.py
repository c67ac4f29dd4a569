"""Pulsar's Python client, unchanged, sees of a service what it saw of a real Pulsar: a short form of `make test-pulsar`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pulsar", reason="there is no pulsar-client for this Python")

from pulsar_admin.distribution import Missing
from pulsar_clients import golden
from pulsar_clients.program import SHORT
from pulsar_clients.run import clients, magnetar, report, saw


@pytest.mark.real
async def test_it_sees_what_it_saw_of_a_pulsar(tmp_path: Path) -> None:
    client, names, wanted = clients("")[0], sorted(SHORT), golden.read(golden.FIRST)
    try:
        with magnetar(tmp_path / "data") as (url, http):
            rows = await saw(client, url, http, tmp_path / "log", names)
    except Missing as error:
        pytest.skip(str(error))
    text, unexplained = report(client.name, {name: wanted[name] for name in names}, rows, Counter())
    assert not unexplained, text
