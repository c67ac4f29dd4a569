"""Which batch of a named write a topic has: what a job of a scheduler goes on from."""

from __future__ import annotations

from magnetar.client import Client
from magnetar.client.administration import ask
from magnetar.proto.commands import QueryState

from .options import WriteOptions
from .service import asking, logs_of


def last_batch(service_url: str, topic: str, query: str) -> int:
    """The number of the last batch that was written with the options `query` and `batch`; -1 if none is remembered.

    A topic remembers a query for `attached_query_ms` (30 days) after its last batch. Raises TopicNotFound.
    """
    options = WriteOptions.parse({"service_url": service_url, "topic": topic})

    async def work(client: Client) -> int:
        log = (await logs_of(client, options.topic))[0]  # the last one to be written
        state = await ask(client.admin, QueryState(0, log, query), topic=log)
        return int(state["batch"])

    return asking(options, work)
