"""The one place where operations are authorized.

An operation is a coroutine method that says which permission it needs and what its resource is:

    @on_topic("produce")
    async def create_producer(self, name: TopicName, ...) -> ProducerOpened: ...

    await service.create_producer(caller, "orders", ...)      # parses the name, asks the caller's authorizer, then begins

Under its name nobody reaches the method without that, and `OPERATIONS` lists all of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import update_wrapper
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from magnetar.proto.ids import TopicName

from .results import ConsumerOpened

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class Caller(Protocol):
    """Who asks: a connection with its principal."""

    def authorize(self, operation: str, resource: str) -> None:
        """Raises NotAuthorized unless the principal has the permission `operation` on the resource."""


class Operation(NamedTuple):
    """A row of `OPERATIONS`."""

    permission: str
    resource: str  # what the resource is: "topic", "topic of the consumer", "namespace" or "cluster"


OPERATIONS: dict[str, Operation] = {}  # by the qualified name of the method


def on_topic(
    permission: str,
) -> Callable[
    [Callable[Concatenate[S, TopicName, P], Awaitable[T]]],
    Callable[Concatenate[S, Caller, str, P], Awaitable[T]],
]:
    """The resource is a topic, named by the caller: callers give its name, the method gets it parsed."""

    def decorate(
        method: Callable[Concatenate[S, TopicName, P], Awaitable[T]],
    ) -> Callable[Concatenate[S, Caller, str, P], Awaitable[T]]:
        OPERATIONS[method.__qualname__] = Operation(permission, "topic")

        async def operation(self: S, caller: Caller, topic: str, /, *args: P.args, **kwargs: P.kwargs) -> T:
            name = TopicName.parse(topic)
            caller.authorize(permission, str(name))
            return await method(self, name, *args, **kwargs)

        update_wrapper(operation, method)
        return operation

    return decorate


def on_consumer(
    permission: str,
) -> Callable[
    [Callable[Concatenate[S, ConsumerOpened, P], Awaitable[T]]],
    Callable[Concatenate[S, Caller, ConsumerOpened, P], Awaitable[T]],
]:
    """The resource is the topic of a consumer that the caller has opened."""

    def decorate(
        method: Callable[Concatenate[S, ConsumerOpened, P], Awaitable[T]],
    ) -> Callable[Concatenate[S, Caller, ConsumerOpened, P], Awaitable[T]]:
        OPERATIONS[method.__qualname__] = Operation(permission, "topic of the consumer")

        async def operation(
            self: S, caller: Caller, opened: ConsumerOpened, /, *args: P.args, **kwargs: P.kwargs
        ) -> T:
            caller.authorize(permission, str(opened.topic.name))
            return await method(self, opened, *args, **kwargs)

        update_wrapper(operation, method)
        return operation

    return decorate


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


def on_namespace(
    permission: str,
) -> Callable[
    [Callable[Concatenate[S, str, P], Awaitable[T]]],
    Callable[Concatenate[S, Caller, str, P], Awaitable[T]],
]:
    """The resource is a namespace `tenant/namespace`, or "" for all."""

    def decorate(
        method: Callable[Concatenate[S, str, P], Awaitable[T]],
    ) -> Callable[Concatenate[S, Caller, str, P], Awaitable[T]]:
        OPERATIONS[method.__qualname__] = Operation(permission, "namespace")

        async def operation(
            self: S, caller: Caller, namespace: str, /, *args: P.args, **kwargs: P.kwargs
        ) -> T:
            caller.authorize(permission, namespace)
            return await method(self, namespace, *args, **kwargs)

        update_wrapper(operation, method)
        return operation

    return decorate
