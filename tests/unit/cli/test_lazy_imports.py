"""Logs and HTTP of a daemon that come late: nothing said meanwhile is lost, no connection is refused."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from magnetar.cli.wiring.lazy_imports import LazyHttp, LazyLogs
from magnetar.proto.errors import ServiceNotReady
from magnetar.runtime.http import Command
from magnetar.runtime.metrics import Metrics


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:], root.level = handlers, level


async def test_records_are_kept_until_structlog_is_there(
    root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = LazyLogs(format="json", level="info", daemon="standalone")
    logs.install()
    logging.getLogger("magnetar.test").info("first %d", 1)
    logging.getLogger("magnetar.test").debug("too fine")
    assert capfd.readouterr().err == ""
    logs.ready()
    async with asyncio.timeout(10):
        while root_logger.handlers == [logs]:
            await asyncio.sleep(0.01)
    logging.getLogger("magnetar.test").warning("second")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["first 1", "second"]
    assert {line["daemon"] for line in lines} == {"standalone"}


def test_flush_brings_structlog_at_once(
    root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = LazyLogs(format="json", level="info", daemon="bookie")
    logs.install()
    logging.getLogger("magnetar.test").critical("the disk failed")
    root_logger.handlers[0].flush()
    assert json.loads(capfd.readouterr().err)["event"] == "the disk failed"
    logs.flush()
    assert capfd.readouterr().err == ""


async def get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


class Asked:
    """Pages that count how often they were asked for metrics."""

    def __init__(self) -> None:
        self.shown = Metrics()
        self.scrapes: list[str] = []

    def failure(self) -> str:
        return "the disk is gone"

    def reasons(self) -> dict[str, str]:
        return {}

    warnings = reasons

    def metrics(self) -> Metrics:
        self.scrapes.append("one")
        return self.shown

    def commands(self) -> dict[tuple[str, str], Command]:
        return {}

    async def handler(self) -> None:
        return None


async def test_the_first_connections_wait_and_are_answered() -> None:
    pages = Asked()
    http = LazyHttp.bind("127.0.0.1", 0, pages)
    try:
        assert not pages.scrapes
        answers = await asyncio.gather(
            *(get(http.address[1], path) for path in ("/health/ready", "/health/live", "/metrics"))
        )
        assert b'"ready": true' in answers[0]
        assert answers[1].startswith(b"HTTP/1.0 503")
        assert b"python_info" in answers[2]
        assert pages.scrapes == ["one"]
    finally:
        await http.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", http.address[1])


async def test_closed_before_anybody_asked() -> None:
    http = LazyHttp.bind("127.0.0.1", 0, Asked())
    with pytest.raises(ServiceNotReady, match="--http-port"):
        LazyHttp.bind("127.0.0.1", http.address[1], Asked())
    await http.close()


@pytest.mark.real
def test_a_daemon_starts_without_the_libraries_of_people_and_scrapers() -> None:
    wiring = ", ".join(f"magnetar.cli.wiring.{name}" for name in ("daemons", "service", "starters"))
    code = f"import sys, {wiring}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"typer", "rich", "structlog", "aiohttp", "prometheus_client", "magnetar.client"}
    # Of Pulsar's protocol, with the first connection.
    assert not loaded & {"google.protobuf", "google_crc32c", "re2", "magnetar.proto.pulsar"}
    assert "magnetar.broker.listeners.pulsar.listener" in loaded
    assert "magnetar.broker.listeners.pulsar.protocol" not in loaded
    # Of a cluster alone.
    assert not loaded & {"magnetar.ledger.replication", "magnetar.broker.ownership.cluster_ownership"}


async def test_rule_46_a_failed_import_is_answered_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    http = LazyHttp.bind("127.0.0.1", 0, Asked(), ["magnetar_test_late_module"])
    try:
        for _ in range(2):
            async with asyncio.timeout(20):
                answer = await get(http.address[1], "/health/ready")
            assert answer.startswith(b"HTTP/1.0 503")
            assert b"No module named 'magnetar_test_late_module'" in answer
        (tmp_path / "magnetar_test_late_module.py").write_text("")
        importlib.invalidate_caches()
        async with asyncio.timeout(20):
            assert b'"ready": true' in await get(http.address[1], "/health/ready")
    finally:
        await http.close()


async def test_rule_46_it_is_closed_after_a_failed_import() -> None:
    http = LazyHttp.bind("127.0.0.1", 0, Asked(), ["magnetar_test_no_module"])
    async with asyncio.timeout(20):
        assert (await get(http.address[1], "/metrics")).startswith(b"HTTP/1.0 503")
        await http.close()
