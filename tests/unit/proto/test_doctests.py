"""The worked cases in the docstrings of proto are true."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "ids",
        "frames",
        "batch",
        "entry",
        "commands",
        "policies",
        "policy_table",
        "policy_shapes",
        "ranges",
        "pulsar.frames",
        "pulsar.commands",
    ],
)
def test_worked_cases(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"magnetar.proto.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
