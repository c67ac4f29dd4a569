"""The rows of policies, of namespaces and topics, made of the table (`proto.policy_table`, `proto.policy_shapes`).

GET    .../SEGMENT               what is set there, or by ?applied=true what is in force
POST   .../SEGMENT               sets it; some are set by PUT
DELETE .../SEGMENT               the next level counts again
GET    .../backlogQuotaMap       both quotas; backlogQuota itself is set and removed by type
.../properties, .../property/KEY one text each
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.policies import Policies
from magnetar.proto.policy_shapes import BACKLOG_QUOTA, SHAPES, Shape

from ...service.results import PoliciesFound
from .routes import NAMESPACE, TOPIC, WHOLE, Asked, Route, text
from .statuses import Refused

_STORAGE: Final = "destination_storage"
_PLAIN: Final = [shape for shape in SHAPES.values() if not shape.variant]
_TEXTS: Final = ("antiAffinity",)  # whose body and answer are texts as they are
_NOT_NULL: Final = {
    "maxTopicsPerNamespace": 0,
    "dispatcherPauseOnAckStatePersistent": False,
}  # where none is set
_CHANGED_BY_200: Final = ("replication", "offloadThresholdInSeconds")  # which is how Pulsar answers


async def _read(asked: Asked) -> PoliciesFound:
    if asked.route.of_topic:
        return await asked.service.topic_policies(asked, asked.topic)
    return await asked.service.namespace_policies(asked, asked.namespace)


async def _change(asked: Asked, shape: Shape, value: Any) -> None:
    """Raises Refused: 400 for what is not of the shape, and what Pulsar answers for a value that may not be."""
    status = 400
    try:
        changes = shape.read(value)
        msgspec.convert({name: one for name, one in changes.items() if one is not None}, Policies)
        status = shape.particular.status
        if asked.route.of_topic:
            await asked.service.change_topic_policies(asked, asked.topic, changes)
        else:
            await asked.service.change_namespace_policies(asked, asked.namespace, changes)
    except msgspec.ValidationError as error:
        raise Refused(400, f"{shape.segment} is {value!r:.100}, of another type: {error}") from None
    except InvalidArgument as error:
        raise Refused(status, error.message) from None


def _values(found: PoliciesFound, applied: bool) -> Callable[[str], Any]:
    if not applied:
        return found.policies.value
    return {row.policy: row.value for row in found.in_force if not row.subscription}.get


def _shape_of(quota: str) -> Shape:
    shape = SHAPES.get(f"{BACKLOG_QUOTA}.{quota}")
    if shape is None:
        raise Refused(412, f"backlogQuotaType is {quota[:40]!r}; want destination_storage or message_age")
    return shape


async def quotas(asked: Asked, *, applied: bool = False) -> dict[str, Any]:
    """The backlog quotas, by type."""
    values = _values(await _read(asked), applied)
    both = {shape.variant: shape.show(values) for shape in SHAPES.values() if shape.segment == BACKLOG_QUOTA}
    return {quota: shown for quota, shown in both.items() if shown is not None}


async def set_quota(asked: Asked, value: dict[str, Any], *, backlog_quota_type: str = _STORAGE) -> None:
    """Sets one of the backlog quotas."""
    await _change(asked, _shape_of(backlog_quota_type), value)


async def remove_quota(asked: Asked, *, backlog_quota_type: str = _STORAGE) -> None:
    """Removes one of the backlog quotas."""
    await _change(asked, _shape_of(backlog_quota_type), None)


def _unset(shape: Shape, asked: Asked) -> Any:
    """Where nothing is set: of none Pulsar's tools print an exception if they want a number or a list."""
    if asked.route.of_topic:
        return False if shape.segment == "schemaValidationEnforced" else None
    if shape.segment == "replication":
        return [asked.service.settings.cluster_name]
    return _NOT_NULL.get(shape.segment, shape.particular.unset)


def _rows(shape: Shape, path: str) -> Iterator[Route]:
    async def show(asked: Asked, *, applied: bool = False) -> Any:
        shown = shape.show(_values(await _read(asked), applied))
        shown = _unset(shape, asked) if shown is None and not applied else shown
        return text(shown) if shape.segment in _TEXTS else shown

    async def put(asked: Asked, value: Any = None) -> None:
        if value is None and shape.segment == "dispatcherPauseOnAckStatePersistent":
            value = True  # Pulsar's tool sends no body
        if shape.segment == "replication" and isinstance(value, list):
            known = await asked.service.tenancy.clusters(asked)
            if unknown := [name for name in value if name not in known]:
                raise Refused(403, f"Invalid cluster id: {unknown[0]!r:.80}; there are {', '.join(known)}")
        await _change(asked, shape, value)

    async def put_text(asked: Asked) -> None:
        await put(asked, asked.body.decode(errors="replace").strip('"'))

    async def remove(asked: Asked) -> None:
        await _change(asked, shape, None)

    async def put_in_query(asked: Asked, messageTTL: int) -> None:  # noqa: N803
        await put(asked, messageTTL)

    names = ", ".join(shape.keys.values())
    show.__doc__, remove.__doc__ = f"The policy {names}.", f"Removes {names}."
    put.__doc__ = put_text.__doc__ = put_in_query.__doc__ = f"Sets {names}."
    status = 200 if shape.segment in _CHANGED_BY_200 else 0
    method = "PUT" if shape.particular.put and path.startswith(NAMESPACE) else "POST"
    yield Route("GET", path, show, partitions=WHOLE)
    if shape.segment == "messageTTL" and path.startswith(TOPIC):
        yield Route(method, path, put_in_query, partitions=WHOLE)
    elif shape.segment in _TEXTS:
        yield Route(method, path, put_text, partitions=WHOLE)
    else:
        yield Route(method, path, put, body="value", status=status, partitions=WHOLE)
    yield Route("DELETE", path, remove, partitions=WHOLE)


POLICY_ROUTES: Final = (
    *(
        row
        for shape in _PLAIN
        if "namespace" in shape.levels
        for row in _rows(shape, f"{NAMESPACE}/{shape.segment}")
    ),
    *(row for shape in _PLAIN if "topic" in shape.levels for row in _rows(shape, f"{TOPIC}/{shape.topic}")),
    *(
        row
        for path in (NAMESPACE, TOPIC)
        for row in (
            Route("GET", f"{path}/{BACKLOG_QUOTA}Map", quotas, partitions=WHOLE),
            Route("POST", f"{path}/{BACKLOG_QUOTA}", set_quota, body="value", partitions=WHOLE),
            Route("DELETE", f"{path}/{BACKLOG_QUOTA}", remove_quota, partitions=WHOLE),
        )
    ),
)
