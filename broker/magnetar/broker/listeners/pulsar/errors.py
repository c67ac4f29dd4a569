"""Our errors as Pulsar's ServerError: what its clients do with each is their protocol, so a row is chosen for that.

ServiceNotReady       the producer or consumer comes again; in an answer to a look-up the client closes the whole connection,
                      so there MetadataError stands in its place: the look-up is repeated
InvalidTopicName      in an answer to a look-up C++, and with it Python, asks again until its time is over: NotAllowedError
                      stands in its place, which is final
PersistenceError, MetadataError, TooManyRequests, UnknownError    the same call again, later
the others            final, and an exception of that name for the application
"""

from __future__ import annotations

from magnetar.proto import errors as e
from magnetar.proto.commands import MAX_ERROR_CHARS
from magnetar.proto.pulsar.wire_pb2 import ServerError as S

# The first base of an error's class that is here counts.
_CODES: dict[type[e.MagnetarError], S] = {
    e.NotEnoughBookies: S.PersistenceError,
    e.BookieUnavailable: S.PersistenceError,
    e.QuorumLost: S.PersistenceError,
    e.ArchiveUnavailable: S.PersistenceError,
    e.StorageFailed: S.PersistenceError,
    e.EntryDamaged: S.PersistenceError,
    e.EntryUnreadable: S.PersistenceError,
    e.MessageLost: S.PersistenceError,
    e.DataDirectoryError: S.MetadataError,
    e.VersionConflict: S.MetadataError,
    e.TooManyRequests: S.TooManyRequests,
    e.BacklogQuotaExceeded: S.ProducerBlockedQuotaExceededException,
    e.InvalidTopicName: S.InvalidTopicName,
    e.ChecksumMismatch: S.ChecksumError,
    e.NotAuthorized: S.AuthorizationError,
    e.AuthenticationFailed: S.AuthenticationError,
    e.UnsupportedVersion: S.UnsupportedVersionError,
    e.TopicNotFound: S.TopicNotFound,
    e.PartitionNotFound: S.NotAllowedError,
    e.NotFound: S.TopicNotFound,  # its namespace
    e.SubscriptionNotFound: S.SubscriptionNotFound,
    e.TopicTerminated: S.TopicTerminatedError,
    e.ConsumerBusy: S.ConsumerBusy,
    e.ProducerBusy: S.ProducerBusy,
    e.ProducerFenced: S.ProducerFenced,
    e.IncompatibleSchema: S.IncompatibleSchema,
    e.AlreadyClosed: S.UnknownError,  # by the client itself
    e.RetryableError: S.ServiceNotReady,
    e.LookupAgainError: S.ServiceNotReady,
    e.InvalidCallError: S.NotAllowedError,
    e.MagnetarError: S.UnknownError,
}
_OF_LOOKUPS = {S.ServiceNotReady: S.MetadataError, S.InvalidTopicName: S.NotAllowedError}


def server_error(error: e.MagnetarError, *, lookup: bool = False) -> S:
    """Its number. `lookup`: nothing was opened yet, and the answer must not end the connection."""
    if "hash_ranges" in error.details:
        return S.ConsumerAssignError
    code = next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
    return _OF_LOOKUPS.get(code, code) if lookup else code


def error_text(error: e.MagnetarError) -> str:
    """Its text, which may quote what the client sent, and more than once: no longer than a frame can take."""
    return error.message[:MAX_ERROR_CHARS]
