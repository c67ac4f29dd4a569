"""Cores that are tried out without changing the one they came from."""

from __future__ import annotations

from collections import deque
from typing import Any

from magnetar.ledger.core.quorum import LastConfirmedQuorum
from magnetar.ledger.core.recovery import _Recovered


def clone(core: Any) -> Any:
    """A core of its own: containers are copied, what is never changed in place is shared."""
    other = object.__new__(type(core))
    for name in core.__slots__ if hasattr(core, "__slots__") else core.__dict__:
        setattr(other, name, _cloned(getattr(core, name)))
    return other


def _cloned(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        if value and type(next(iter(value.values()))) is _Recovered:
            return {key: clone(item) for key, item in value.items()}
        return value.copy()
    if kind is list:
        return value.copy()
    if kind is deque:
        return deque([clone(add) for add in value])
    if kind is LastConfirmedQuorum:
        return clone(value)
    return value
