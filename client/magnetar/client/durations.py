"""Durations: given as seconds or as a timedelta, read in seconds."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, overload

Duration = float | timedelta
"""Seconds, or a timedelta."""

if TYPE_CHECKING:

    class Seconds:
        """A field of a dataclass that is set as a Duration and read in seconds: for checkers, at run time a plain number."""

        @overload
        def __get__(self, options: None, owner: Any) -> Seconds: ...
        @overload
        def __get__(self, options: object, owner: Any) -> float: ...
        def __get__(self, options: object | None, owner: Any) -> Any: ...
        def __set__(self, options: object, value: Duration) -> None: ...

    class OptionalSeconds:
        """The same, or None."""

        @overload
        def __get__(self, options: None, owner: Any) -> OptionalSeconds: ...
        @overload
        def __get__(self, options: object, owner: Any) -> float | None: ...
        def __get__(self, options: object | None, owner: Any) -> Any: ...
        def __set__(self, options: object, value: Duration | None) -> None: ...

else:
    Seconds, OptionalSeconds = Duration, Duration | None


class _Unit:
    def __rmul__(self, number: float) -> Any:
        return number


SECONDS = _Unit()
"""For the default of such a field: `timeout: Seconds = 30.0 * SECONDS`."""

FOR_EVER: Any = None
"""The default of one that is optional."""


def set_in_seconds(options: Any) -> None:
    """For `__post_init__` of a frozen dataclass."""
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, timedelta):
            object.__setattr__(options, field.name, value.total_seconds())


def in_seconds(duration: Duration) -> float:
    """What a call was given, in seconds."""
    return duration.total_seconds() if isinstance(duration, timedelta) else duration
