"""The commands 64 to 74 of the native protocol: frames to calls, one authorization each."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from magnetar.proto import commands as c
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import TopicName

from .archived import decode_wanted
from .attach import decode_attachment
from .damage import decode_damage
from .queries import Batch

if TYPE_CHECKING:
    from ..topics.registry import Broker
    from ..topics.topic import Topic

_decode_ids = msgspec.msgpack.Decoder(list[int]).decode


class Asker(Protocol):
    """The connection that asks."""

    def authorize(self, operation: str, resource: str) -> None:
        """Raises NotAuthorized."""


async def _known(broker: Broker, asker: Asker, operation: str, text: str) -> Topic:
    """The topic, if it exists. Raises NotAuthorized, TopicNotFound."""
    name = TopicName.parse(text)
    asker.authorize(operation, str(name))
    return await broker.known(name)


async def _found(broker: Broker, asker: Asker, operation: str, text: str) -> Topic:
    """The topic, made if settings allow it. Raises NotAuthorized, TopicNotFound."""
    name = TopicName.parse(text)
    asker.authorize(operation, str(name))
    return await broker.find(name)


async def _topic_ledgers(
    broker: Broker, asker: Asker, command: c.TopicLedgers, _payload: bytes
) -> dict[str, Any]:
    topic = await _known(broker, asker, "topic_ledgers", command.topic)
    return await topic.export.ledgers(command.after, command.count)


async def _keep_ledgers(
    broker: Broker, asker: Asker, command: c.KeepLedgers, _payload: bytes
) -> dict[str, Any]:
    topic = await _known(broker, asker, "keep_ledgers", command.topic)
    if command.ttl_ms == 0 and not command.lease:
        raise InvalidArgument("a lease needs a ttl_ms, or a name to be ended by")
    lease = command.lease or broker.generate_name()
    return await topic.export.keep_ledgers(lease, command.ttl_ms, command.first, topic.trimmed)


async def _create_staged(
    broker: Broker, asker: Asker, command: c.CreateStagedLedger, _payload: bytes
) -> dict[str, Any]:
    topic = await _found(broker, asker, "stage_ledgers", command.topic)
    return await topic.export.staging.create(command.transaction)


async def _get_metadata(
    broker: Broker, asker: Asker, command: c.GetLedgerMetadata, _payload: bytes
) -> dict[str, Any]:
    topic = await _known(broker, asker, "topic_ledgers", command.topic)
    return await topic.export.staging.get(command.ledger)


async def _put_metadata(
    broker: Broker, asker: Asker, command: c.PutLedgerMetadata, payload: bytes
) -> dict[str, Any]:
    topic = await _known(broker, asker, "stage_ledgers", command.topic)
    return {"version": await topic.export.staging.put(command.ledger, command.version, payload)}


async def _keep_staged(
    broker: Broker, asker: Asker, command: c.KeepStaged, _payload: bytes
) -> dict[str, Any]:
    topic = await _known(broker, asker, "stage_ledgers", command.topic)
    return topic.export.staging.keep(command.transaction, command.ttl_ms)


async def _discard_staged(
    broker: Broker, asker: Asker, command: c.DiscardStaged, payload: bytes
) -> dict[str, Any]:
    topic = await _known(broker, asker, "stage_ledgers", command.topic)
    try:
        stored_ids = _decode_ids(payload) if payload else None
    except msgspec.MsgspecError as error:
        raise InvalidArgument(
            f"the ledgers to discard are not a msgpack array of stored ids: {error}"
        ) from None
    return {"discarded": await topic.export.staging.discard(command.transaction, stored_ids)}


async def _attach_ledgers(
    broker: Broker, asker: Asker, command: c.AttachLedgers, payload: bytes
) -> dict[str, Any]:
    topic = await _found(broker, asker, "attach_ledgers", command.topic)
    batch = Batch(command.query, command.batch, command.remember_ms)
    return await topic.export.attachments.attach(batch, decode_attachment(payload))


async def _query_state(
    broker: Broker, asker: Asker, command: c.QueryState, _payload: bytes
) -> dict[str, Any]:
    name = TopicName.parse(command.topic)
    asker.authorize("attach_ledgers", str(name))
    if broker.settings.auto_create_topics and not await broker.exists(name):
        return {"batch": -1}  # whoever attaches makes it
    topic = await broker.known(name)
    return {"batch": topic.export.attachments.last_batch(command.query)}


async def _report_damage(
    broker: Broker, asker: Asker, command: c.ReportDamage, payload: bytes
) -> dict[str, Any]:
    topic = await _known(broker, asker, "report_damage", command.topic)
    return await topic.export.report_damage(decode_damage(payload))


async def _archive_ledgers(
    broker: Broker, asker: Asker, command: c.ArchiveLedgers, payload: bytes
) -> dict[str, Any]:
    topic = await _known(broker, asker, "archive_ledgers", command.topic)
    wanted = decode_wanted(
        command.location, payload, lease=command.lease, dry=command.dry, moved=command.moved
    )
    return await topic.export.archiving.archive(wanted)


ExportHandler = Callable[["Broker", Asker, Any, bytes], Coroutine[Any, Any, dict[str, Any]]]
EXPORT_REQUESTS: dict[type[c.Command], ExportHandler] = {
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
}
