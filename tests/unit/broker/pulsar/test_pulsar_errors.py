"""Errors as Pulsar's clients get them: what may pass is tried again, what is final is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from magnetar.broker.listeners.pulsar.errors import server_error
from magnetar.broker.listeners.requests import for_client
from magnetar.proto import errors as e
from magnetar.proto.pulsar.wire_pb2 import ServerError as S

# With which Java gives up; and C++, Python and Go those of them that they know.
FINAL = {
    S.ProducerBusy, S.ConsumerBusy, S.TopicNotFound, S.SubscriptionNotFound, S.IncompatibleSchema, S.ConsumerAssignError,
    S.NotAllowedError, S.AuthorizationError, S.AuthenticationError, S.ProducerFenced, S.TopicTerminatedError,
}  # fmt: skip


def kinds(base: type[e.MagnetarError] = e.MagnetarError) -> Iterator[type[e.MagnetarError]]:
    """All classes of errors."""
    yield base
    for kind in base.__subclasses__():
        if kind.__module__ == e.__name__:
            yield from kinds(kind)


@pytest.mark.parametrize("kind", list(dict.fromkeys(kinds())))
@pytest.mark.parametrize("lookup", [False, True])
def test_rule_50_what_may_pass_is_final_for_nobody(kind: type[e.MagnetarError], *, lookup: bool) -> None:
    code = server_error(for_client(kind("text")), lookup=lookup)
    if issubclass(kind, e.StorageFailed) or kind("text").retryable:
        assert code not in FINAL
    if lookup:  # trap 5: the client closes its connection; C++ asks again for a name that is none
        assert code not in (S.ServiceNotReady, S.InvalidTopicName)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (e.ProducerBusy("x"), S.ProducerBusy),
        (e.ConsumerBusy("x"), S.ConsumerBusy),
        (e.TopicNotFound("x"), S.TopicNotFound),
        (e.SubscriptionNotFound("x"), S.SubscriptionNotFound),
        (e.IncompatibleSchema("x"), S.IncompatibleSchema),
        (e.InvalidArgument("x"), S.NotAllowedError),
        (e.InvalidArgument("x", hash_ranges=[]), S.ConsumerAssignError),
        (e.MessageTooLarge("x"), S.NotAllowedError),
        (e.NotAuthorized("x"), S.AuthorizationError),
        (e.AuthenticationFailed("x"), S.AuthenticationError),
        (e.ProducerFenced("x"), S.ProducerFenced),
        (e.TopicTerminated("x"), S.TopicTerminatedError),
        (e.ChecksumMismatch("x"), S.ChecksumError),
        (e.BacklogQuotaExceeded("x"), S.ProducerBlockedQuotaExceededException),
        (e.TopicNotServed("x"), S.ServiceNotReady),
        (e.TopicBusy("x"), S.ServiceNotReady),
        (e.QuorumLost("x"), S.PersistenceError),
        (e.DiskFull("x"), S.PersistenceError),
        (e.StorageFailed("x"), S.ServiceNotReady),  # of this process, which stops
    ],
)
def test_each_error_is_that_of_pulsar(error: e.MagnetarError, code: S) -> None:
    assert server_error(for_client(error)) == code
