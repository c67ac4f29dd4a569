"""Requests of the native protocol, but for opening and closing: commands become calls on the service, results answers.

No decision stands here. An answer is a map with the fields of the typed result; WIRE.md lists them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from magnetar.proto import commands as c
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.policies import decode_policies

from ...export.archived import decode_wanted
from ...export.attach import decode_attachment
from ...export.damage import decode_damage
from ...export.queries import Batch
from ...service import BrokerService, Caller
from ...service.results import ConsumerOpened

_decode_ids = msgspec.msgpack.Decoder(list[int]).decode


async def _lookup(service: BrokerService, caller: Caller, command: c.Lookup, _: bytes) -> Any:
    found = await service.lookup(
        caller, command.topic, authoritative=command.authoritative, unreachable=command.unreachable
    )
    return {"url": found.url, "final": found.final}


async def _list_brokers(service: BrokerService, caller: Caller, _command: c.ListBrokers, _: bytes) -> Any:
    return await service.list_brokers(caller)


async def _list_bundles(service: BrokerService, caller: Caller, command: c.ListBundles, _: bytes) -> Any:
    return await service.list_bundles(caller, command.namespace)


async def _unload_bundle(service: BrokerService, caller: Caller, command: c.UnloadBundle, _: bytes) -> Any:
    await service.unload_bundle(caller, command.bundle, to=command.to)


async def _split_bundle(service: BrokerService, caller: Caller, command: c.SplitBundle, _: bytes) -> Any:
    return {"bundles": await service.split_bundle(caller, command.bundle)}


async def _drain(service: BrokerService, caller: Caller, command: c.Drain, _: bytes) -> Any:
    return await service.drain(caller, command.name, zone=command.zone, kind=command.kind, undo=command.undo)


async def _partitions(service: BrokerService, caller: Caller, command: c.Partitions, _: bytes) -> Any:
    return {"partitions": await service.partitions(caller, command.topic)}


async def _list_topics(service: BrokerService, caller: Caller, command: c.ListTopics, _: bytes) -> Any:
    return await service.list_topics(caller, command.namespace, after=command.after, count=command.count)


async def _topic_stats(service: BrokerService, caller: Caller, command: c.TopicStats, _: bytes) -> Any:
    return await service.topic_stats(caller, command.topic)


async def _create_topic(service: BrokerService, caller: Caller, command: c.CreateTopic, _: bytes) -> Any:
    await service.create_topic(caller, command.topic, partitions=command.partitions)


async def _delete_topic(service: BrokerService, caller: Caller, command: c.DeleteTopic, _: bytes) -> Any:
    await service.delete_topic(caller, command.topic, force=command.force)


async def _delete_subscription(
    service: BrokerService, caller: Caller, command: c.DeleteSubscription, _: bytes
) -> Any:
    await service.delete_subscription(caller, command.topic, command.subscription, force=command.force)


async def _get_policies(service: BrokerService, caller: Caller, command: c.GetPolicies, _: bytes) -> Any:
    _check_level(command)
    if command.topic:
        return await service.topic_policies(caller, command.topic)
    return await service.namespace_policies(caller, command.namespace)


async def _set_policies(
    service: BrokerService, caller: Caller, command: c.SetPolicies, payload: bytes
) -> Any:
    _check_level(command)
    policies = decode_policies(payload)
    if command.topic:
        version = await service.set_topic_policies(caller, command.topic, policies, command.version)
    else:
        version = await service.set_namespace_policies(caller, command.namespace, policies, command.version)
    return {"version": version}


def _check_level(command: c.GetPolicies | c.SetPolicies) -> None:
    if bool(command.topic) == bool(command.namespace):
        raise InvalidArgument("policies are of a topic or of a namespace: name one of the two")


async def _expire_messages(
    service: BrokerService, caller: Caller, command: c.ExpireMessages, _: bytes
) -> Any:
    return await service.expire_messages(caller, command.topic, command.subscription, command.before_ms)


async def _create_subscription(
    service: BrokerService, caller: Caller, command: c.CreateSubscription, _: bytes
) -> Any:
    await service.create_subscription(caller, command.topic, command.subscription, start=command.start)


async def _seek_subscription(
    service: BrokerService, caller: Caller, command: c.SeekSubscription, _: bytes
) -> Any:
    topic, subscription = command.topic, command.subscription
    return {"epoch": await service.seek_subscription(caller, topic, subscription, start=command.start)}


async def _skip_messages(service: BrokerService, caller: Caller, command: c.SkipMessages, _: bytes) -> Any:
    return await service.skip_messages(caller, command.topic, command.subscription, count=command.count)


async def _peek_messages(service: BrokerService, caller: Caller, command: c.PeekMessages, _: bytes) -> Any:
    return await service.peek_messages(caller, command.topic, command.subscription, count=command.count)


async def _clear_backlog(service: BrokerService, caller: Caller, command: c.ClearBacklog, _: bytes) -> Any:
    return await service.clear_backlog(caller, command.topic, command.subscription)


async def _compact_topic(service: BrokerService, caller: Caller, command: c.CompactTopic, _: bytes) -> Any:
    return await service.compact_topic(caller, command.topic, action=command.action)


async def _topic_ledgers(service: BrokerService, caller: Caller, command: c.TopicLedgers, _: bytes) -> Any:
    return await service.ledgers.topic_ledgers(
        caller, command.topic, after=command.after, count=command.count
    )


async def _keep_ledgers(service: BrokerService, caller: Caller, command: c.KeepLedgers, _: bytes) -> Any:
    return await service.ledgers.keep_ledgers(
        caller, command.topic, lease=command.lease, ttl_ms=command.ttl_ms, first=command.first
    )


async def _create_staged(
    service: BrokerService, caller: Caller, command: c.CreateStagedLedger, _: bytes
) -> Any:
    return await service.ledgers.create_staged_ledger(
        caller, command.topic, command.transaction, command.ttl_ms
    )


async def _get_metadata(
    service: BrokerService, caller: Caller, command: c.GetLedgerMetadata, _: bytes
) -> Any:
    return await service.ledgers.get_ledger_metadata(caller, command.topic, command.ledger)


async def _put_metadata(
    service: BrokerService, caller: Caller, command: c.PutLedgerMetadata, payload: bytes
) -> Any:
    version = await service.ledgers.put_ledger_metadata(
        caller, command.topic, command.ledger, command.version, payload
    )
    return {"version": version}


async def _keep_staged(service: BrokerService, caller: Caller, command: c.KeepStaged, _: bytes) -> Any:
    return await service.ledgers.keep_staged(
        caller, command.topic, command.transaction, ttl_ms=command.ttl_ms
    )


async def _discard_staged(
    service: BrokerService, caller: Caller, command: c.DiscardStaged, payload: bytes
) -> Any:
    try:
        stored_ids = _decode_ids(payload) if payload else None
    except msgspec.MsgspecError as error:
        raise InvalidArgument(
            f"the ledgers to discard are not a msgpack array of stored ids: {error}"
        ) from None
    discarded = await service.ledgers.discard_staged(caller, command.topic, command.transaction, stored_ids)
    return {"discarded": discarded}


async def _attach_ledgers(
    service: BrokerService, caller: Caller, command: c.AttachLedgers, payload: bytes
) -> Any:
    batch = Batch(command.query, command.batch, command.remember_ms, command.content)
    return await service.ledgers.attach_ledgers(caller, command.topic, batch, decode_attachment(payload))


async def _query_state(service: BrokerService, caller: Caller, command: c.QueryState, _: bytes) -> Any:
    return {"batch": await service.ledgers.last_batch(caller, command.topic, command.query)}


async def _report_damage(
    service: BrokerService, caller: Caller, command: c.ReportDamage, payload: bytes
) -> Any:
    return await service.ledgers.report_damage(caller, command.topic, decode_damage(payload))


async def _archive_ledgers(
    service: BrokerService, caller: Caller, command: c.ArchiveLedgers, payload: bytes
) -> Any:
    wanted = decode_wanted(
        command.location,
        payload,
        lease=command.lease,
        dry=command.dry,
        moved=command.moved,
        with_backlog=command.with_backlog,
    )
    return await service.ledgers.archive_ledgers(caller, command.topic, wanted)


def started(opened: ConsumerOpened, epoch: int, trimmed: bool) -> dict[str, Any]:
    """The answer to Subscribe and Seek."""
    return {"epoch": epoch, "position": opened.subscription.cursor.state.mark_delete, "trimmed": trimmed}


async def _seek(service: BrokerService, caller: Caller, command: c.Seek, opened: ConsumerOpened) -> Any:
    return started(opened, *await service.seek(caller, opened, command.start))


async def _last_message_id(
    service: BrokerService, caller: Caller, _: c.LastMessageId, opened: ConsumerOpened
) -> Any:
    found = await service.last_message_id(caller, opened)
    return None if found is None else found.to_bytes()


REQUESTS: dict[type[c.Command], Callable[[BrokerService, Caller, Any, bytes], Awaitable[Any]]] = {
    c.Lookup: _lookup,
    c.Partitions: _partitions,
    c.ListTopics: _list_topics,
    c.TopicStats: _topic_stats,
    c.CreateTopic: _create_topic,
    c.DeleteTopic: _delete_topic,
    c.DeleteSubscription: _delete_subscription,
    c.GetPolicies: _get_policies,
    c.SetPolicies: _set_policies,
    c.ExpireMessages: _expire_messages,
    c.CreateSubscription: _create_subscription,
    c.SeekSubscription: _seek_subscription,
    c.SkipMessages: _skip_messages,
    c.PeekMessages: _peek_messages,
    c.ClearBacklog: _clear_backlog,
    c.CompactTopic: _compact_topic,
    c.TopicLedgers: _topic_ledgers,
    c.KeepLedgers: _keep_ledgers,
    c.CreateStagedLedger: _create_staged,
    c.GetLedgerMetadata: _get_metadata,
    c.PutLedgerMetadata: _put_metadata,
    c.KeepStaged: _keep_staged,
    c.DiscardStaged: _discard_staged,
    c.AttachLedgers: _attach_ledgers,
    c.QueryState: _query_state,
    c.ArchiveLedgers: _archive_ledgers,
    c.ReportDamage: _report_damage,
    c.ListBrokers: _list_brokers,
    c.ListBundles: _list_bundles,
    c.UnloadBundle: _unload_bundle,
    c.SplitBundle: _split_bundle,
    c.Drain: _drain,
}

# Of an open consumer, which they get instead of a payload.
CONSUMER_REQUESTS: dict[
    type[c.Command], Callable[[BrokerService, Caller, Any, ConsumerOpened], Awaitable[Any]]
] = {
    c.Seek: _seek,
    c.LastMessageId: _last_message_id,
}


def to_wire(result: Any) -> Any:
    """A typed result as maps, lists and plain values."""
    return msgspec.to_builtins(result, builtin_types=(bytes,))
