"""Errors are Magnetar's and Python's: each says what to do, and is caught by the word that Python has for it."""

import pickle

import pytest

from magnetar.proto import errors
from magnetar.proto.errors import ERRORS_BY_CODE, Action, MagnetarError, error_from_wire

PYTHON_S: list[tuple[type[Exception], list[type[MagnetarError]]]] = [
    (TimeoutError, [errors.RequestTimeout, errors.SendTimeout, errors.ReceiveTimeout]),
    (ConnectionError, [errors.ConnectionLost]),
    (
        ValueError,
        [
            errors.InvalidArgument,
            errors.InvalidTopicName,
            errors.InvalidSetting,
            errors.SequenceIdError,
            errors.MessageTooLarge,
        ],
    ),
    (PermissionError, [errors.NotAuthorized, errors.AuthenticationFailed]),
    (
        LookupError,
        [errors.TopicNotFound, errors.PartitionNotFound, errors.SubscriptionNotFound, errors.NotFound],
    ),
]


@pytest.mark.parametrize(("builtin", "classes"), PYTHON_S)
def test_what_python_has_a_word_for(builtin: type[Exception], classes: list[type[MagnetarError]]) -> None:
    assert [cls for cls in ERRORS_BY_CODE.values() if issubclass(cls, builtin)] == sorted(
        classes, key=list(ERRORS_BY_CODE.values()).index
    )


@pytest.mark.parametrize("cls", ERRORS_BY_CODE.values())
def test_text_and_details_survive_the_wire_and_pickling(cls: type[MagnetarError]) -> None:
    error = cls("it failed", url="here")
    for copy in (error, pickle.loads(pickle.dumps(error))):
        assert (str(copy), copy.message, copy.details) == ("it failed", "it failed", {"url": "here"})
        assert copy.retryable == (cls.action in (Action.RETRY, Action.LOOK_UP))
    assert type(error_from_wire(cls.code, cls.action, "it failed")) is cls
    assert str(cls())
