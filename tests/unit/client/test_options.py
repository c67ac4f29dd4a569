"""Settings stand once: the keyword arguments of the public calls are the fields of the options, with their defaults."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.client import Client, blocking, connect
from magnetar.client.options import ClientOptions, ConsumerOptions, ProducerOptions, ReaderOptions


@pytest.mark.parametrize(
    ("call", "options", "others"),
    [
        (connect, ClientOptions, {"url", "clock", "rng"}),
        (Client.create_producer, ProducerOptions, {"self", "topic"}),
        (Client.subscribe, ConsumerOptions, {"self", "topic", "subscription"}),
        (Client.create_reader, ReaderOptions, {"self", "topic"}),
        (blocking.connect, ClientOptions, {"url", "clock", "rng"}),
        (blocking.Client.create_producer, ProducerOptions, {"self", "topic"}),
        (blocking.Client.subscribe, ConsumerOptions, {"self", "topic", "subscription"}),
        (blocking.Client.create_reader, ReaderOptions, {"self", "topic"}),
    ],
)
def test_keyword_arguments_are_the_options(call: Callable[..., Any], options: Any, others: set[str]) -> None:
    parameters = inspect.signature(call).parameters
    assert {field.name for field in dataclasses.fields(options)} == parameters.keys() - others
    for field in dataclasses.fields(options):
        parameter = parameters[field.name]
        assert (parameter.default, parameter.annotation) == (field.default, field.type), field.name
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY


def test_the_blocking_client_has_the_names_of_the_asyncio_client() -> None:
    for name in ("Client", "Producer", "Consumer", "Reader"):
        facade, original = getattr(blocking, name), getattr(__import__("magnetar.client").client, name)
        public = {key for key in dir(original) if not key.startswith("_")}
        internal = {"abandon", "open", "request", "connection_of_topic", "options", "closed", "open_messages"}
        internal |= {"refill", "last_sequence_id", "pending_bytes"}
        assert public - internal <= set(dir(facade)), name
        for key in public - internal:
            assert getattr(facade, key).__doc__, key
