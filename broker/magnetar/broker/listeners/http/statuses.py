"""Which status an error is answered with: Pulsar's, as far as the class of the error says it."""

from __future__ import annotations

from typing import Final

from magnetar.proto import errors as e

# The first class that fits counts, from the error's own upwards.
STATUSES: Final[dict[type[e.MagnetarError], int]] = {
    e.MalformedFrame: 400, e.InvalidCallError: 400, e.AuthenticationFailed: 401, e.NotAuthorized: 403,
    e.TopicNotFound: 404, e.PartitionNotFound: 404, e.SubscriptionNotFound: 404, e.NotFoundInStore: 404, e.NotFound: 404,
    e.LedgerNotFound: 404, e.EntryNotFound: 404, e.MessageLost: 404, e.NotAllowed: 405,
    e.AlreadyExists: 409, e.VersionConflict: 409, e.TopicBusy: 409, e.NotEmpty: 409, e.IncompatibleSchema: 409,
    e.InvalidArgument: 412, e.InvalidTopicName: 412, e.TopicInUse: 412, e.ConsumerBusy: 412, e.TopicTerminated: 412,
    e.FrameTooLarge: 413, e.MessageTooLarge: 413, e.TooManyRequests: 429,
    e.MagnetarError: 500, e.Unsupported: 501, e.RetryableError: 503, e.LookupAgainError: 503, e.RequestTimeout: 504,
}  # fmt: skip


class Refused(Exception):
    """An answer of HTTP alone: no other protocol has such an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def status_of(error: e.MagnetarError | Refused) -> int:
    """Of the answer to a request that failed with it."""
    if isinstance(error, Refused):
        return error.status
    return next(STATUSES[cls] for cls in type(error).__mro__ if cls in STATUSES)
