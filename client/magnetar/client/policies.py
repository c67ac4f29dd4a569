"""Policies of topics and namespaces as an administrator reads and changes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from magnetar.proto.commands import Command, GetPolicies, SetPolicies
from magnetar.proto.errors import InvalidArgument, VersionConflict
from magnetar.proto.policies import Policies, PolicyInForce

# Two administrators who change policies at a time meet once; more conflicts in a row are not theirs.
_ATTEMPTS = 5
Request = Callable[[Command, bytes], Awaitable[Any]]


class FoundPolicies(NamedTuple):
    """What is set for a topic or a namespace itself, its version, and what is in force there in the end."""

    policies: Policies
    version: int
    in_force: list[PolicyInForce]


async def read_policies(request: Request, topic: str, namespace: str) -> FoundPolicies:
    """Of a topic or, if `topic` is empty, of a namespace."""
    answer = await request(GetPolicies(0, topic, namespace), b"")
    policies = msgspec.convert(answer["policies"], Policies)
    return FoundPolicies(policies, answer["version"], [PolicyInForce(*row) for row in answer["in_force"]])


async def update_policies(
    request: Request, topic: str, namespace: str, changed: Mapping[str, Any]
) -> FoundPolicies:
    """Replaces the policies that are named; what is set to None is that of the next level again.

    Of `subscription_ttl_ms` those subscriptions that are named. Raises InvalidArgument, VersionConflict.
    """
    for name in changed:
        if name not in Policies.__struct_fields__:
            raise InvalidArgument(f"{name!r} is no policy; there are {', '.join(Policies.__struct_fields__)}")
    if not changed:
        return await read_policies(request, topic, namespace)
    for attempt in range(1, _ATTEMPTS + 1):
        found = await read_policies(request, topic, namespace)
        policies = _with(found.policies, changed)
        command = SetPolicies(0, topic, namespace, found.version)
        try:
            await request(command, msgspec.msgpack.encode(policies))
        except VersionConflict:
            if attempt == _ATTEMPTS:
                raise
            continue
        break
    return await read_policies(request, topic, namespace)


def _with(policies: Policies, changed: Mapping[str, Any]) -> Policies:
    fields = dict(changed)
    if "subscription_ttl_ms" in fields:
        ttls = {**policies.subscription_ttl_ms, **(fields["subscription_ttl_ms"] or {})}
        fields["subscription_ttl_ms"] = {name: ttl_ms for name, ttl_ms in ttls.items() if ttl_ms is not None}
    try:
        return msgspec.convert({**msgspec.structs.asdict(policies), **fields}, Policies).check()
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"the policies are not as they should be: {error}") from None
