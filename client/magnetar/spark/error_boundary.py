"""What Spark calls us by, with errors that a person can read.

Spark quotes the Python traceback of a failed call in an error of its own, once in each log line about it and twice in the
final one; forty lines of our frames stood before the one that says what to mend. So errors whose text says it all leave
here without the way that they came. Everything else keeps its traceback: damage, and whatever may be a bug of ours.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from magnetar.proto.errors import (
    AuthenticationFailed,
    InvalidArgument,
    InvalidSetting,
    InvalidTopicName,
    MagnetarError,
    MessageLost,
    MessageTooLarge,
    NotAuthorized,
    RetryableError,
    SubscriptionNotFound,
    TopicNotFound,
    Unsupported,
)

_log = logging.getLogger(__name__)

C = TypeVar("C", bound=type)

PLAIN: tuple[type[MagnetarError], ...] = (
    AuthenticationFailed, InvalidArgument, InvalidSetting, InvalidTopicName, MessageLost, MessageTooLarge, NotAuthorized,
    RetryableError, SubscriptionNotFound, TopicNotFound, Unsupported,
)  # fmt: skip


def short_errors(*names: str) -> Callable[[C], C]:
    """Decorates a class: those methods of it are what Spark calls. Iterators they return are covered as well."""

    def decorate(cls: C) -> C:
        for name in names:
            setattr(cls, name, _short(vars(cls)[name]))
        return cls

    return decorate


def _short(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        try:
            found = method(*args, **named)
        except PLAIN as error:
            raise _plain(error) from None
        return _rows(found) if inspect.isgenerator(found) else found

    return call


def _rows(rows: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from rows
    except PLAIN as error:
        raise _plain(error) from None


def _plain(error: MagnetarError) -> MagnetarError:
    _log.debug("an error goes to Spark", exc_info=error)
    return error.with_traceback(None)
