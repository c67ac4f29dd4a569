"""The one place where operations are authorized.

An operation is a coroutine method that says which permission it needs and what its resource is:

    @on_topic("produce")
    async def create_producer(self, name: TopicName, ...) -> ProducerOpened: ...

    await service.create_producer(caller, "orders", ...)      # parses the name, asks the caller's authorizer, then begins

Under its name nobody reaches the method without that, and `OPERATIONS` lists all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import update_wrapper
from typing import Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

from magnetar.proto.errors import NotAuthorized, Unsupported
from magnetar.proto.ids import TopicName

from .results import ConsumerOpened

A = TypeVar("A")
G = TypeVar("G")
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class Caller(Protocol):
    """Who asks: a connection with its principal."""

    def authorize(self, operation: str, resource: str) -> None:
        """Raises NotAuthorized unless the principal has the permission `operation` on the resource."""


class Operation(NamedTuple):
    """A row of `OPERATIONS`."""

    permission: str  # "produce or consume": one of them is enough
    resource: (
        str  # what the resource is: "topic", "topic of the consumer", "namespace", "tenant" or "cluster"
    )


OPERATIONS: dict[str, Operation] = {}  # by the qualified name of the method


class _On(Generic[A, G]):
    """Decorates operations of one kind of resource: callers give an `A`, the method gets what `find` makes of it."""

    def __init__(self, resource: str, find: Callable[[A], tuple[G, str]]) -> None:
        """`find` returns the resource's name as well, or raises."""
        self._resource = resource
        self._find = find

    def __call__(
        self, *permissions: str
    ) -> Callable[
        [Callable[Concatenate[S, G, P], Awaitable[T]]],
        Callable[Concatenate[S, Caller, A, P], Awaitable[T]],
    ]:
        find = self._find

        def decorate(
            method: Callable[Concatenate[S, G, P], Awaitable[T]],
        ) -> Callable[Concatenate[S, Caller, A, P], Awaitable[T]]:
            OPERATIONS[method.__qualname__] = Operation(" or ".join(permissions), self._resource)

            async def operation(self: S, caller: Caller, asked: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
                given, name = find(asked)
                _authorize(caller, permissions, name)
                return await method(self, given, *args, **kwargs)

            update_wrapper(operation, method)
            return operation

        return decorate


def _authorize(caller: Caller, permissions: Sequence[str], name: str) -> None:
    """Raises NotAuthorized unless the caller has one of the permissions."""
    for permission in permissions[:-1]:
        with contextlib.suppress(NotAuthorized):
            caller.authorize(permission, name)
            return
    caller.authorize(permissions[-1], name)


def _parsed(topic: str) -> tuple[TopicName, str]:
    name = TopicName.parse(topic)
    return name, str(name)


def _stored(topic: str) -> tuple[TopicName, str]:
    name = TopicName.parse(topic)
    if not name.persistent:
        raise Unsupported(
            f"{name} is a non-persistent topic: nothing of it is stored, so it has no ledgers, archive, compaction or "
            "policies of its own, and no subscription without a consumer; this needs a persistent topic"
        )
    return name, str(name)


def _opened(consumer: ConsumerOpened) -> tuple[ConsumerOpened, str]:
    return consumer, str(consumer.topic.name)


def _namespace(namespace: str) -> tuple[str, str]:
    return namespace, namespace


# A topic, named by the caller: callers give its name, the method gets it parsed.
on_topic = _On("topic", _parsed)
# The same, of what is stored of it: Unsupported for a non-persistent one.
on_stored_topic = _On("topic", _stored)
# The topic of a consumer that the caller has opened.
on_consumer = _On("topic of the consumer", _opened)
# A namespace `tenant/namespace`, or "" for all.
on_namespace = _On("namespace", _namespace)
on_tenant = _On("tenant", _namespace)


def on_cluster(
    permission: str,
) -> Callable[
    [Callable[Concatenate[S, P], Awaitable[T]]],
    Callable[Concatenate[S, Caller, P], Awaitable[T]],
]:
    """The resource is the cluster, whose name is ""."""

    def decorate(
        method: Callable[Concatenate[S, P], Awaitable[T]],
    ) -> Callable[Concatenate[S, Caller, P], Awaitable[T]]:
        OPERATIONS[method.__qualname__] = Operation(permission, "cluster")

        async def operation(self: S, caller: Caller, /, *args: P.args, **kwargs: P.kwargs) -> T:
            caller.authorize(permission, "")
            return await method(self, *args, **kwargs)

        update_wrapper(operation, method)
        return operation

    return decorate
