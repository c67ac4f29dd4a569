"""Found by the simulation (standalone, seed 53): a failing disk must not close the consumers of a service that restarts."""

from magnetar.broker.listeners.requests import for_client
from magnetar.proto.errors import ConsumerBusy, ServiceNotReady, StorageFailed


def test_client_is_told_to_try_again_when_the_storage_failed() -> None:
    told = for_client(StorageFailed("input/output error"))
    assert isinstance(told, ServiceNotReady)
    assert told.retryable
    assert "input/output error" in told.message


def test_other_errors_are_told_as_they_are() -> None:
    error = ConsumerBusy("held by another")
    assert for_client(error) is error
