"""The client of Magnetar: produce, consume, acknowledge and read, on any asyncio event loop.

    from magnetar.client import connect

    async with connect("magnetar://127.0.0.1:7650") as client:
        producer = await client.create_producer("orders")
        await producer.send(b"one", key="k")

        async with client.subscribe("orders", "billing", start="earliest") as consumer:
            async for message in consumer:
                await consumer.ack(message)

`magnetar.client.blocking` has the same names without `await`. Depends on magnetar.proto and magnetar.runtime only.
"""

from magnetar.proto.compression import CompressionName
from magnetar.proto.errors import (
    Action,
    AlreadyClosed,
    AlreadyExists,
    AuthenticationFailed,
    BacklogQuotaExceeded,
    ChecksumMismatch,
    ConnectionLost,
    ConsumerBusy,
    DiskFull,
    EntryDamaged,
    EntryUnreadable,
    FinalError,
    FrameTooLarge,
    InvalidArgument,
    InvalidCallError,
    InvalidTopicName,
    LookupAgainError,
    MagnetarError,
    MalformedFrame,
    MessageLost,
    MessageTooLarge,
    NotAllowed,
    NotAuthorized,
    NotEmpty,
    NotEnoughBookies,
    NotFound,
    PartitionNotFound,
    ProducerBusy,
    ProducerFenced,
    ProducerQueueFull,
    ReceiveTimeout,
    RequestTimeout,
    RetryableError,
    SendTimeout,
    SequenceIdError,
    ServiceNotReady,
    StorageFailed,
    SubscriptionNotFound,
    TooManyRequests,
    TopicBusy,
    TopicInUse,
    TopicNotFound,
    TopicTerminated,
    Unsupported,
    UnsupportedVersion,
    VersionConflict,
)
from magnetar.proto.ids import MessageId
from magnetar.proto.policies import Policies, PolicyInForce

from .administration import Admin, FoundPolicies
from .client import Client, connect
from .consumer import Consumer
from .core.routing import OutgoingMessage
from .durations import Duration
from .messages import Message, MessageBatch, StreamedMessage
from .options import DeadLetterPolicy, RedeliveryBackoff, Start, SubscriptionType
from .producer import Producer
from .receipts import Receipt
from .receiving import Reader
from .service_url import AutoFailover
from .table_view import TableView

__all__ = [
    "Action",
    "Admin",
    "AlreadyClosed",
    "AlreadyExists",
    "AuthenticationFailed",
    "AutoFailover",
    "BacklogQuotaExceeded",
    "ChecksumMismatch",
    "Client",
    "CompressionName",
    "ConnectionLost",
    "Consumer",
    "ConsumerBusy",
    "DeadLetterPolicy",
    "DiskFull",
    "Duration",
    "EntryDamaged",
    "EntryUnreadable",
    "FinalError",
    "FoundPolicies",
    "FrameTooLarge",
    "InvalidArgument",
    "InvalidCallError",
    "InvalidTopicName",
    "LookupAgainError",
    "MagnetarError",
    "MalformedFrame",
    "Message",
    "MessageBatch",
    "MessageId",
    "MessageLost",
    "MessageTooLarge",
    "NotAllowed",
    "NotAuthorized",
    "NotEmpty",
    "NotEnoughBookies",
    "NotFound",
    "OutgoingMessage",
    "PartitionNotFound",
    "Policies",
    "PolicyInForce",
    "Producer",
    "ProducerBusy",
    "ProducerFenced",
    "ProducerQueueFull",
    "Reader",
    "Receipt",
    "ReceiveTimeout",
    "RedeliveryBackoff",
    "RequestTimeout",
    "RetryableError",
    "SendTimeout",
    "SequenceIdError",
    "ServiceNotReady",
    "Start",
    "StorageFailed",
    "StreamedMessage",
    "SubscriptionNotFound",
    "SubscriptionType",
    "TableView",
    "TooManyRequests",
    "TopicBusy",
    "TopicInUse",
    "TopicNotFound",
    "TopicTerminated",
    "Unsupported",
    "UnsupportedVersion",
    "VersionConflict",
    "connect",
]
