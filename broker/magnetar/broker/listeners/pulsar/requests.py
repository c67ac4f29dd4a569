"""Requests of Pulsar's protocol but for those of producers and consumers: commands to calls on the service, and answers.

A row says by what a command is answered, and how it is refused: some answers have an error of their own, which is what
clients look at then, and an ERROR refuses the others.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from google.protobuf.message import Message

from magnetar.proto.errors import (
    ConsumerBusy,
    InvalidArgument,
    MagnetarError,
    NotAllowed,
)
from magnetar.proto.ids import DOMAINS
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.wire_pb2 import ServerError as S

from ...service.broker import BrokerService
from .errors import error_text, server_error
from .ports import Link
from .schemas import add_schema, get_schema
from .watches import MAX_PATTERN_CHARS, Pattern, TopicsHash, list_topics

Refusal = Callable[[Any, MagnetarError], Message]


class Row(NamedTuple):
    """Of a command."""

    answer: Callable[[BrokerService, Link, Any], Awaitable[Message]]
    refuse: Refusal


def failed(command: Any, error: MagnetarError, *, lookup: bool = False) -> wire.CommandError:
    """ERROR, always with a text."""
    code = server_error(error, lookup=lookup)
    return wire.CommandError(request_id=command.request_id, error=code, message=error_text(error))


def failed_request(command: Any, error: MagnetarError) -> wire.CommandError:
    """The same of a request that a consumer makes: what is not possible now, its client asks again."""
    return failed(command, error, lookup=True)


def not_unsubscribed(command: Any, error: MagnetarError) -> Message:
    """The same; that others are connected is an error of its own with Pulsar."""
    refused = failed_request(command, error)
    if isinstance(error, ConsumerBusy):
        refused.error = S.MetadataError
    return refused


def _refusing(answer: type[Message], **fixed: Any) -> Refusal:
    """By the fields that the answer has for an error."""
    error_code, text = "error", "message"
    if "error_code" in answer.DESCRIPTOR.fields_by_name:
        error_code, text = "error_code", "error_message"

    def refuse(command: Any, error: MagnetarError) -> Message:
        fields = {error_code: server_error(error, lookup=True), text: error_text(error)}
        return answer(request_id=command.request_id, **fields, **fixed)

    return refuse


# --- look-ups ------------------------------------------------------------------------------------------------------------


async def _partitions(
    service: BrokerService, link: Link, command: wire.CommandPartitionedMetadata
) -> Message:
    if command.metadata_auto_creation_enabled:
        count = await service.partitions_to_use(link, command.topic)
    else:
        count = await service.partitions(link, command.topic, existing=True)
    response = wire.CommandPartitionedMetadataResponse
    return response(request_id=command.request_id, partitions=count, response=response.SUCCESS)


async def _lookup(service: BrokerService, link: Link, command: wire.CommandLookup) -> Message:
    """Java looks up a pattern as if it were a topic, before it watches what matches: what no name has is a dash then."""
    namespace, slash, name = command.topic.rpartition("/")
    topic = namespace + slash + re.sub(r"[^-=:.\w]", "-", name)
    owner = await service.admin.owner(link, topic, authoritative=command.authoritative, with_http=False)
    if not owner.pulsar:
        raise NotAllowed(f"{command.topic} is served at {owner.url}, where Pulsar's protocol is not spoken")
    response = wire.CommandLookupResponse
    return response(
        request_id=command.request_id,
        response=response.CONNECT if owner.final else response.REDIRECT,
        broker_service_url=owner.pulsar,
        authoritative=True,
        proxy_through_service_url=service.settings.pulsar_through_service_url,
    )


async def _topics(service: BrokerService, link: Link, command: wire.CommandGetTopicsOfNamespace) -> Message:
    """Partitions by their own names. A pattern that is long, or not one of RE2, is left to the client, as Pulsar may."""
    mode = {command.PERSISTENT: DOMAINS[:1], command.NON_PERSISTENT: DOMAINS[1:]}.get(command.mode, DOMAINS)
    pattern = None
    if 0 < len(command.topics_pattern) <= MAX_PATTERN_CHARS:
        with contextlib.suppress(InvalidArgument):
            pattern = Pattern(command.topics_pattern)
    topics = await list_topics(service, link, command.namespace, mode, pattern)
    found = str(TopicsHash(topics))
    changed = found != command.topics_hash
    return wire.CommandGetTopicsOfNamespaceResponse(
        request_id=command.request_id,
        topics=topics if changed else [],
        filtered=pattern is not None,
        topics_hash=found,
        changed=changed,
    )


async def _transaction(service: BrokerService, link: Link, command: Any) -> Message:
    raise NotAllowed("this service has no transactions: publish and acknowledge without one")


REFUSE_STATS = _refusing(wire.CommandConsumerStatsResponse)
# By the name of the command.
ROWS: dict[str, Row] = {
    "partitioned_metadata": Row(
        _partitions,
        _refusing(
            wire.CommandPartitionedMetadataResponse, response=wire.CommandPartitionedMetadataResponse.FAILED
        ),
    ),
    "lookup": Row(_lookup, _refusing(wire.CommandLookupResponse, response=wire.CommandLookupResponse.FAILED)),
    "get_topics_of_namespace": Row(_topics, failed),
    "get_schema": Row(get_schema, _refusing(wire.CommandGetSchemaResponse)),
    "get_or_create_schema": Row(add_schema, _refusing(wire.CommandGetOrCreateSchemaResponse)),
    "tc_client_connect_request": Row(_transaction, _refusing(wire.CommandTcClientConnectResponse)),
    "new_txn": Row(_transaction, _refusing(wire.CommandNewTxnResponse)),
    "add_partition_to_txn": Row(_transaction, _refusing(wire.CommandAddPartitionToTxnResponse)),
    "add_subscription_to_txn": Row(_transaction, _refusing(wire.CommandAddSubscriptionToTxnResponse)),
    "end_txn": Row(_transaction, _refusing(wire.CommandEndTxnResponse)),
}
