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
_Answer = Callable[[BrokerService, Caller, Any, bytes], Awaitable[Any]]


def _as(name: str, answer: _Answer) -> _Answer:
    """The answer is a map with what `answer` returns under this name."""

    async def named(service: BrokerService, caller: Caller, asked: Any, payload: bytes) -> Any:
        return {name: await answer(service, caller, asked, payload)}

    return named


async def _lookup(service: BrokerService, caller: Caller, command: c.Lookup, _: bytes) -> Any:
    found = await service.lookup(
        caller, command.topic, authoritative=command.authoritative, unreachable=command.unreachable
    )
    return {"url": found.url, "final": found.final}


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


async def _seek_subscription(
    service: BrokerService, caller: Caller, command: c.SeekSubscription, _: bytes
) -> Any:
    topic, subscription = command.topic, command.subscription
    return {"epoch": await service.seek_subscription(caller, topic, subscription, start=command.start)}


async def _put_metadata(
    service: BrokerService, caller: Caller, command: c.PutLedgerMetadata, payload: bytes
) -> Any:
    version = await service.ledgers.put_ledger_metadata(
        caller, command.topic, command.ledger, command.version, payload
    )
    return {"version": version}


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


REQUESTS: dict[type[c.Command], _Answer] = {
    c.Lookup: _lookup,
    c.Partitions: _as(
        "partitions", lambda service, caller, asked, _: service.partitions(caller, asked.topic)
    ),
    c.ListTopics: lambda service, caller, asked, _: service.list_topics(
        caller, asked.namespace, after=asked.after, count=asked.count
    ),
    c.TopicStats: lambda service, caller, asked, _: service.topic_stats(caller, asked.topic),
    c.CreateTopic: lambda service, caller, asked, _: service.create_topic(
        caller, asked.topic, partitions=asked.partitions
    ),
    c.DeleteTopic: lambda service, caller, asked, _: service.delete_topic(
        caller, asked.topic, force=asked.force
    ),
    c.DeleteSubscription: lambda service, caller, asked, _: service.delete_subscription(
        caller, asked.topic, asked.subscription, force=asked.force
    ),
    c.GetPolicies: _get_policies,
    c.SetPolicies: _set_policies,
    c.ExpireMessages: lambda service, caller, asked, _: service.expire_messages(
        caller, asked.topic, asked.subscription, asked.before_ms
    ),
    c.CreateSubscription: lambda service, caller, asked, _: service.create_subscription(
        caller, asked.topic, asked.subscription, start=asked.start
    ),
    c.SeekSubscription: _seek_subscription,
    c.SkipMessages: lambda service, caller, asked, _: service.skip_messages(
        caller, asked.topic, asked.subscription, count=asked.count
    ),
    c.PeekMessages: lambda service, caller, asked, _: service.peek_messages(
        caller, asked.topic, asked.subscription, count=asked.count
    ),
    c.ClearBacklog: lambda service, caller, asked, _: service.clear_backlog(
        caller, asked.topic, asked.subscription
    ),
    c.CompactTopic: lambda service, caller, asked, _: service.compact_topic(
        caller, asked.topic, action=asked.action
    ),
    c.TopicLedgers: lambda service, caller, asked, _: service.ledgers.topic_ledgers(
        caller, asked.topic, after=asked.after, count=asked.count
    ),
    c.KeepLedgers: lambda service, caller, asked, _: service.ledgers.keep_ledgers(
        caller, asked.topic, lease=asked.lease, ttl_ms=asked.ttl_ms, first=asked.first
    ),
    c.CreateStagedLedger: lambda service, caller, asked, _: service.ledgers.create_staged_ledger(
        caller, asked.topic, asked.transaction, asked.ttl_ms
    ),
    c.GetLedgerMetadata: lambda service, caller, asked, _: service.ledgers.get_ledger_metadata(
        caller, asked.topic, asked.ledger
    ),
    c.PutLedgerMetadata: _put_metadata,
    c.KeepStaged: lambda service, caller, asked, _: service.ledgers.keep_staged(
        caller, asked.topic, asked.transaction, ttl_ms=asked.ttl_ms
    ),
    c.DiscardStaged: _discard_staged,
    c.AttachLedgers: _attach_ledgers,
    c.QueryState: _as(
        "batch",
        lambda service, caller, asked, _: service.ledgers.last_batch(caller, asked.topic, asked.query),
    ),
    c.ArchiveLedgers: _archive_ledgers,
    c.ReportDamage: lambda service, caller, asked, payload: service.ledgers.report_damage(
        caller, asked.topic, decode_damage(payload)
    ),
    c.ListBrokers: lambda service, caller, asked, _: service.list_brokers(caller),
    c.ListBundles: lambda service, caller, asked, _: service.list_bundles(caller, asked.namespace),
    c.UnloadBundle: lambda service, caller, asked, _: service.unload_bundle(
        caller, asked.bundle, to=asked.to
    ),
    c.SplitBundle: _as(
        "bundles", lambda service, caller, asked, _: service.split_bundle(caller, asked.bundle)
    ),
    c.Drain: lambda service, caller, asked, _: service.drain(
        caller, asked.name, zone=asked.zone, kind=asked.kind, undo=asked.undo
    ),
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
