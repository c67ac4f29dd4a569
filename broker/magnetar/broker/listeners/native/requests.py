"""Requests of the native protocol, but for opening and closing: commands become calls on the service, results answers.

No decision stands here. An answer is a map with the fields of the typed result; WIRE.md lists them.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

import msgspec

from magnetar.proto import commands as c
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import MessageId
from magnetar.proto.policies import decode_changes

from ...export.archived import Wanted, decode_archived
from ...export.attach import decode_attachment
from ...export.damage import decode_damage
from ...export.queries import Batch
from ...service.broker import BrokerService
from ...service.ledgers import LedgerService
from ...service.operations import OPERATIONS, Caller
from ...service.results import ConsumerOpened
from ...service.tenancy import TenancyService

_Answer = Callable[[BrokerService, Caller, Any, bytes], Awaitable[Any]]


def _call(
    operation: Callable[..., Awaitable[Any]], result: str = "", **payload: Callable[[bytes], Any]
) -> _Answer:
    """The fields of the command are the operation's arguments, by name; its payload is one more, decoded.

    The answer is a map with what the operation returns under the name `result`, or "" if that is a map itself.
    """
    resource = OPERATIONS[operation.__qualname__].resource
    of_ledgers = operation.__qualname__.startswith(LedgerService.__name__)

    async def answer(service: BrokerService, caller: Caller, command: c.Command, data: bytes) -> Any:
        fields = {name: getattr(command, name) for name in command.__struct_fields__ if name != "request_id"}
        of = [] if resource == "cluster" else [fields.pop(resource)]
        fields |= {name: decode(data) for name, decode in payload.items()}
        found = await operation(service.ledgers if of_ledgers else service, caller, *of, **fields)
        return {result: found} if result else found

    return answer


async def _partitions(service: BrokerService, caller: Caller, command: c.Partitions, _: bytes) -> Any:
    count = service.partitions_to_use if command.create else service.partitions
    return {"partitions": await count(caller, command.topic)}


async def _get_policies(service: BrokerService, caller: Caller, command: c.GetPolicies, _: bytes) -> Any:
    _check_level(command)
    if command.topic:
        return await service.topic_policies(caller, command.topic)
    return await service.namespace_policies(caller, command.namespace)


async def _change_policies(
    service: BrokerService, caller: Caller, command: c.ChangePolicies, payload: bytes
) -> Any:
    _check_level(command)
    changes = decode_changes(payload)
    if command.topic:
        version = await service.change_topic_policies(caller, command.topic, changes)
    else:
        version = await service.change_namespace_policies(caller, command.namespace, changes, make=True)
    return {"version": version}


def _check_level(command: c.GetPolicies | c.ChangePolicies) -> None:
    if command.topic and command.namespace:
        raise InvalidArgument("policies are of a topic or of a namespace: name one of the two")


def _stored_ids(payload: bytes) -> list[int] | None:
    try:
        return msgspec.msgpack.decode(payload, type=list[int]) if payload else None
    except msgspec.MsgspecError as error:
        raise InvalidArgument(
            f"the ledgers to discard are not a msgpack array of stored ids: {error}"
        ) from None


async def _administer(service: BrokerService, caller: Caller, command: c.Administer, payload: bytes) -> Any:
    asked = (command.kind, command.verb)
    operation = ADMINISTRATION.get(asked)
    if operation is None:
        known = ", ".join(map(" ".join, ADMINISTRATION))
        raise InvalidArgument(f"there is no {' '.join(asked)!r:.80}; want one of {known}")
    _, *takes = inspect.signature(operation).parameters
    of = [command.name] * (OPERATIONS[operation.__qualname__].resource != "cluster" or "name" in takes)
    try:
        given = msgspec.msgpack.decode(payload, type=dict[str, Any]) if payload else {}
        if unknown := given.keys() - takes[len(of) :]:
            raise InvalidArgument(f"{' '.join(asked)} takes no {', '.join(sorted(unknown))}")
        types = get_type_hints(operation)
        arguments = {name: msgspec.convert(value, types[name]) for name, value in given.items()}
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"an argument of {' '.join(asked)} is wrong: {error}") from None
    return await operation(service.tenancy, caller, *of, **arguments)


async def _attach_ledgers(
    service: BrokerService, caller: Caller, command: c.AttachLedgers, payload: bytes
) -> Any:
    batch = Batch(command.query, command.batch, command.remember_ms, command.content)
    return await service.ledgers.attach_ledgers(caller, command.topic, batch, decode_attachment(payload))


async def _archive_ledgers(
    service: BrokerService, caller: Caller, command: c.ArchiveLedgers, payload: bytes
) -> Any:
    _, topic, location, *how = msgspec.structs.astuple(command)
    return await service.ledgers.archive_ledgers(
        caller, topic, Wanted(location, decode_archived(payload), *how)
    )


def started(opened: ConsumerOpened, epoch: int, trimmed: bool) -> dict[str, Any]:
    """The answer to Subscribe and Seek."""
    return {"epoch": epoch, "position": opened.subscription.cursor.state.mark_delete, "trimmed": trimmed}


async def _terminate_topic(
    service: BrokerService, caller: Caller, command: c.TerminateTopic, _: bytes
) -> Any:
    found = await service.terminate_topic(caller, command.topic)
    return None if found is None else found.to_bytes()


async def _seek(service: BrokerService, caller: Caller, command: c.Seek, opened: ConsumerOpened) -> Any:
    return started(opened, *await service.seek(caller, opened, command.start))


async def _last_message_id(
    service: BrokerService, caller: Caller, _: c.LastMessageId, opened: ConsumerOpened
) -> Any:
    found = await service.last_message_id(caller, opened)
    return None if found is None else found.to_bytes()


async def _unfinished_message(
    service: BrokerService, caller: Caller, command: c.UnfinishedMessage, opened: ConsumerOpened
) -> Any:
    until = None if command.until is None else MessageId.from_bytes(command.until)
    lost, end = await service.unfinished_message(
        caller, opened, command.producer, command.chunk_id, until, held=command.held
    )
    return {"lost": lost, "end": None if end is None else end.to_bytes()}


_B, _L, _T = BrokerService, LedgerService, TenancyService

# Of Administer, by kind and verb. Its name, and its arguments by name, are those of the operation.
ADMINISTRATION: dict[tuple[str, str], Callable[..., Awaitable[Any]]] = {
    ("clusters", "list"): _T.clusters,
    ("clusters", "get"): _T.cluster,
    ("tenants", "list"): _T.tenants,
    ("tenants", "get"): _T.tenant,
    ("tenants", "create"): _T.create_tenant,
    ("tenants", "update"): _T.update_tenant,
    ("tenants", "delete"): _T.delete_tenant,
    ("namespaces", "list"): _T.namespaces,
    ("namespaces", "get"): _T.namespace,
    ("namespaces", "create"): _T.create_namespace,
    ("namespaces", "delete"): _T.delete_namespace,
    ("namespaces", "stats"): _T.namespace_stats,
}

REQUESTS: dict[type[c.Command], _Answer] = {
    c.Lookup: _call(_B.lookup),
    c.Partitions: _partitions,
    c.ListTopics: _call(_B.list_topics),
    c.TopicStats: _call(_B.topic_stats),
    c.CreateTopic: _call(_B.create_topic),
    c.UpdatePartitions: _call(_B.update_partitions, "partitions"),
    c.DeleteTopic: _call(_B.delete_topic),
    c.TerminateTopic: _terminate_topic,
    c.DeleteSubscription: _call(_B.delete_subscription),
    c.GetPolicies: _get_policies,
    c.ChangePolicies: _change_policies,
    c.ExpireMessages: _call(_B.expire_messages),
    c.CreateSubscription: _call(_B.create_subscription),
    c.SeekSubscription: _call(_B.seek_subscription, "epoch"),
    c.SkipMessages: _call(_B.skip_messages),
    c.PeekMessages: _call(_B.peek_messages),
    c.ClearBacklog: _call(_B.clear_backlog),
    c.CompactTopic: _call(_B.compact_topic),
    c.TopicLedgers: _call(_L.topic_ledgers),
    c.KeepLedgers: _call(_L.keep_ledgers),
    c.CreateStagedLedger: _call(_L.create_staged_ledger),
    c.GetLedgerMetadata: _call(_L.get_ledger_metadata),
    c.PutLedgerMetadata: _call(_L.put_ledger_metadata, "version", metadata=bytes),
    c.KeepStaged: _call(_L.keep_staged),
    c.DiscardStaged: _call(_L.discard_staged, "discarded", stored_ids=_stored_ids),
    c.AttachLedgers: _attach_ledgers,
    c.QueryState: _call(_L.last_batch, "batch"),
    c.ArchiveLedgers: _archive_ledgers,
    c.ReportDamage: _call(_L.report_damage, rows=decode_damage),
    c.ListBrokers: _call(_B.list_brokers),
    c.Diagnose: _call(_B.diagnose),
    c.ListBookies: _call(_B.list_bookies),
    c.ListBusiest: _call(_B.list_busiest),
    c.ListBundles: _call(_B.list_bundles),
    c.UnloadBundle: _call(_B.unload_bundle),
    c.SplitBundle: _call(_B.split_bundle, "bundles"),
    c.Drain: _call(_B.drain),
    c.Administer: _administer,
}

# Of an open consumer, which they get instead of a payload.
CONSUMER_REQUESTS: dict[
    type[c.Command], Callable[[BrokerService, Caller, Any, ConsumerOpened], Awaitable[Any]]
] = {
    c.Seek: _seek,
    c.LastMessageId: _last_message_id,
    c.UnfinishedMessage: _unfinished_message,
}


def to_wire(result: Any) -> Any:
    """A typed result as maps, lists and plain values."""
    return msgspec.to_builtins(result, builtin_types=(bytes,))
