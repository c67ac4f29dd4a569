"""Logs, metrics and HTTP of a daemon."""

import io
import json
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping

import aiohttp
import pytest
import structlog

from magnetar.proto.errors import InvalidSetting
from magnetar.runtime.http import Command, HttpServer
from magnetar.runtime.logs import configure_logging
from magnetar.runtime.metrics import Metrics


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def test_machines_get_one_json_object_a_line() -> None:
    stream = io.StringIO()
    configure_logging(format="json", level="info", stream=stream, daemon="broker")
    structlog.get_logger("magnetar.broker").info("topic opened", topic="orders")
    logging.getLogger("magnetar.connection").warning("peer %s left", "x")
    logging.getLogger("magnetar.connection").debug("unseen")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("other").exception("failed")
    first, second, third = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["topic"], first["daemon"]) == ("topic opened", "orders", "broker")
    assert (second["event"], second["level"]) == ("peer x left", "warning")
    assert second["logger"] == "magnetar.connection"
    assert first["timestamp"].endswith("Z")
    assert "ValueError: broken" in third["exception"]


def test_people_get_text() -> None:
    stream = io.StringIO()
    configure_logging(format="console", stream=stream)
    logging.getLogger("magnetar").info("ready")
    assert "ready" in stream.getvalue()
    assert not stream.getvalue().startswith("{")
    with pytest.raises(InvalidSetting, match="log level 'loud'"):
        configure_logging(level="loud")


class Said:
    """The pages of a daemon that says what the test says."""

    def __init__(self, metrics: Metrics) -> None:
        self.shown: Metrics | None = metrics
        self.failed = ""
        self.unready: dict[str, str] = {}
        self.known: dict[str, str] = {}
        self.done: dict[tuple[str, str], Command] = {}

    def failure(self) -> str:
        return self.failed

    def reasons(self) -> dict[str, str]:
        return self.unready

    def warnings(self) -> dict[str, str]:
        return self.known

    def metrics(self) -> Metrics | None:
        return self.shown

    def commands(self) -> dict[tuple[str, str], Command]:
        return self.done

    async def handler(self) -> None:
        return None


async def one_line(arguments: Mapping[str, str]) -> AsyncIterator[Mapping[str, str]]:
    yield dict(arguments)


async def test_metrics_health_and_readiness() -> None:
    metrics = Metrics()
    stored, rows = 5, [(["a"], 1.0), (["b"], 2.0)]
    metrics.observe("stored_bytes", "stored", lambda: stored, rising=True)
    metrics.observe("backlog", "waiting", lambda: rows, labels=["subscription"])
    metrics.distribution(
        "read_seconds", "reads", lambda: [(["log"], (0.1, 1.0), [2, 1, 4], 9.5)], labels=["source"]
    )
    said = Said(metrics)
    listening = socket.create_server(("127.0.0.1", 0))
    server = await HttpServer.start(listening, said)
    host, port = listening.getsockname()
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:

        async def get(path: str) -> tuple[int, str]:
            async with session.get(path) as response:
                return response.status, await response.text()

        stored = 7
        status, text = await get("/metrics")
        assert status == 200
        for line in (
            "magnetar_stored_bytes_total 7.0",
            'magnetar_backlog{subscription="b"} 2.0',
            'magnetar_read_seconds_bucket{le="0.1",source="log"} 2.0',
            'magnetar_read_seconds_bucket{le="1.0",source="log"} 3.0',
            'magnetar_read_seconds_bucket{le="+Inf",source="log"} 7.0',
            'magnetar_read_seconds_count{source="log"} 7.0',
            'magnetar_read_seconds_sum{source="log"} 9.5',
            "process_resident_memory_bytes",
        ):
            assert line in text
        assert await get("/health") == (200, '{"status": "ok", "problems": {}, "warnings": {}}')
        assert await get("/health/live") == (200, '{"live": true, "reasons": {}}')
        assert await get("/health/ready") == (200, '{"ready": true, "reasons": {}, "notes": {}}')
        said.known["read_only"] = "the disk is full"
        assert await get("/health/ready") == (
            200,
            '{"ready": true, "reasons": {}, "notes": {"read_only": "the disk is full"}}',
        )
        said.unready["stopping"] = "it was asked to"
        status, text = await get("/health")
        assert status == 200
        assert json.loads(text) == {
            "status": "degraded",
            "problems": {},
            "warnings": said.known | said.unready,
        }
        status, text = await get("/health/ready")
        assert (status, json.loads(text)["reasons"]) == (503, {"stopping": "it was asked to"})
        assert (await get("/health/live"))[0] == 200, "a restart does not help"
        said.failed = "StorageFailed: the disk is gone"
        assert await get("/health/live") == (
            503,
            '{"live": false, "reasons": {"failed": "StorageFailed: the disk is gone"}}',
        )
        assert (await get("/health"))[0] == 503
        said.shown = None
        assert (await get("/metrics"))[0] == 503
        assert (await get("/bookie/info"))[0] == 404
        said.done["GET", "/bookie/info"] = one_line
        assert await get("/bookie/info?a=b") == (200, '{"a": "b"}\n')
        async with session.post("/bookie/info") as response:
            assert response.status == 404
        assert (await get("/nothing"))[0] == 404
    await server.close()
