"""Requests of the driver are made on a loop of their own, also in a notebook, whose thread runs a loop already."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.proto.errors import ConnectionLost
from magnetar.spark.jobs.topics import check_topics
from magnetar.spark.options import ReadOptions
from magnetar.spark.service import on_a_loop

NOBODY = ReadOptions.parse({"service_url": "magnetar://127.0.0.1:1", "topic": "orders", "timeout_s": "5"})


async def answer() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_in_a_program() -> None:
    assert on_a_loop(answer).is_closed()
    with pytest.raises(ConnectionLost, match="is the service running there"):
        check_topics(NOBODY)


async def test_in_a_notebook() -> None:
    loop = on_a_loop(answer)
    assert loop is not asyncio.get_running_loop()
    assert loop.is_closed()
    with pytest.raises(ConnectionLost, match="is the service running there"):
        check_topics(NOBODY)
