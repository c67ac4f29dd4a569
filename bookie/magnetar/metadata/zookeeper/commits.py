"""A commit as ZooKeeper's multi: all or nothing, in order.

ZooKeeper knows no implied parents: `/a/b/c` needs a node `/a/b`. An implied parent is a node whose value is null, which
no node of the interface has (theirs may be empty, which is something else). It comes and goes with what is below it:

    Create          first the parents that are missing; where an implied parent is already: its value is set
    Delete          fails while real nodes are below it; implied ones without real nodes below them go first
    Check(absent)   make the node and delete it; of an implied parent: check that it still is one

Most commits need nothing of this. So each is first sent as if parents were there, and when ZooKeeper refuses an
operation, the nodes that matter are read, and the commit is sent again with what is known now (`Facts`). An attempt
that meets another change in between starts the next one; a multi has no effect unless all of it has, so trying again is
safe. An answer that was lost is never tried again: the commit may have been done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from magnetar.proto.errors import (
    AlreadyExists,
    ConnectionLost,
    FinalError,
    InvalidArgument,
    MagnetarError,
    NodeNotEmpty,
    NotAuthorized,
    NotFoundInStore,
    TooManyRequests,
    VersionConflict,
)

from ..store import MAX_VALUE_BYTES, Check, Create, Delete, Operation, Put, split_path
from . import wire
from .connection import LOST, MAX_PENDING, Answer, Connection
from .namespace import Namespace
from .wire import ANY_VERSION, Request, ZooKeeperError

# jute.maxbuffer as ZooKeeper ships it; a server that gets more closes the connection.
MAX_REQUEST_BYTES = 0xFFFFF
_MAX_ATTEMPTS = 20
_MAX_VERSION = 2**31 - 1


@dataclass(slots=True)
class Facts:
    """What refusals taught about nodes, by path. It may be outdated; then the next refusal corrects it."""

    missing: set[str] = field(default_factory=set)  # parents that do not exist
    implied: dict[str, int] = field(default_factory=dict)  # nodes that are implied parents: their versions
    # Nodes to be deleted: the implied parents below them, the deepest first, with their versions.
    below: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


class Step(NamedTuple):
    """One operation of a multi."""

    request: Request
    number: int  # of the operation of the commit that it is part of
    path: str
    parent: bool = False  # it makes an implied parent
    pruned: str | None = None  # it deletes an implied parent below this node


def plan(operations: Sequence[Operation], space: Namespace, facts: Facts) -> list[Step]:
    """The steps of the multi, if the facts are true."""
    steps: list[Step] = []
    made: set[str] = set()  # implied parents that an earlier step makes
    created: set[str] = set()  # nodes that it makes
    for index, operation in enumerate(operations):
        path = operation.path
        full = space.full(path)
        match operation:
            case Create(_, value, session):
                for parent in _missing_parents(path, facts, made | created):
                    made.add(parent)
                    steps.append(_make_parent(parent, index, space))
                created.add(path)
                version = 0 if path in made else facts.implied.get(path)
                if version is None:
                    request = wire.create(full, value, ephemeral=session is not None, private=space.private)
                elif session is None:
                    request = wire.set_data(full, value, version)
                else:
                    raise _at(
                        index,
                        NodeNotEmpty(f"{path} has nodes below it; a session's node has none", path=path),
                    )
                steps.append(Step(request, index, path))
            case Put(_, value, version):
                steps.append(Step(wire.set_data(full, value, version), index, path))
            case Delete(_, version):
                for implied, implied_version in facts.below.get(path, ()):
                    request = wire.delete(space.full(implied), implied_version)
                    steps.append(Step(request, index, implied, pruned=path))
                request = wire.delete(full, ANY_VERSION if version is None else version)
                steps.append(Step(request, index, path))
                made.discard(path)
                created.discard(path)
            case Check(_, version):
                steps += _check_steps(index, path, version, space, facts, made)
    return steps


def _check_steps(
    index: int, path: str, version: int | None, space: Namespace, facts: Facts, made: set[str]
) -> Iterator[Step]:
    full = space.full(path)
    if version is None:
        version = 0 if path in made else facts.implied.get(path)
    if version is not None:
        yield Step(wire.check_version(full, version), index, path)
        return
    parents = list(_missing_parents(path, facts, made))
    for parent in parents:
        yield _make_parent(parent, index, space)
    yield Step(wire.create(full, None, private=space.private), index, path)
    yield Step(wire.delete(full, 0), index, path)
    for parent in reversed(parents):
        yield Step(wire.delete(space.full(parent), 0), index, parent)


def _missing_parents(path: str, facts: Facts, made: set[str]) -> Iterator[str]:
    return (
        parent
        for parent in reversed(list(_ancestors(path)))
        if parent in facts.missing and parent not in made
    )


def _make_parent(parent: str, index: int, space: Namespace) -> Step:
    return Step(wire.create(space.full(parent), None, private=space.private), index, parent, parent=True)


def _ancestors(path: str) -> Iterator[str]:
    """Those that are nodes of the interface: without the root."""
    while path := path.rpartition("/")[0]:
        yield path


async def commit(connection: Connection, operations: Sequence[Operation], space: Namespace) -> list[int]:
    """Does all of it on one connection; the versions that its Creates begin with.

    Raises as MetadataStore.commit; ConnectionLost: it may have been done.
    """
    for index, operation in enumerate(operations):
        _check_operation(index, operation)
    facts = Facts()
    for _ in range(_MAX_ATTEMPTS):
        steps = plan(operations, space, facts)
        if not steps:
            return []
        failed, error = await _send(connection, steps)
        if failed is None:
            return [_first_version(path, facts) for path, *_ in operations]
        try:
            await _learn(connection, operations, space, facts, failed, error)
        except MagnetarError as refusal:
            raise _at(failed.number, refusal) from None
    path = operations[0].path
    raise VersionConflict(
        f"what is around {path} changed at each of {_MAX_ATTEMPTS} attempts; try again", path=path
    )


def _first_version(path: str, facts: Facts) -> int:
    return facts.implied[path] + 1 if path in facts.implied else 0


async def prune_parents(connection: Connection, paths: Sequence[str], space: Namespace) -> None:
    """Deletes the implied parents of deleted nodes that have nothing below them any more. Never raises."""
    parents = list(dict.fromkeys(path.rpartition("/")[0] for path in paths))
    answers = [(parent, connection.request(wire.exists(space.full(parent)))) for parent in parents if parent]
    for parent, answer in answers:
        error, frame = await answer
        if error or wire.decode_stat(frame)[1:3] != (0, 0):
            continue
        error, frame = await connection.request(wire.get_data(space.full(parent)))
        if error:
            continue
        node = wire.decode_data(frame)
        if node.value is None:
            # Of this version: a node that somebody made of it meanwhile stays.
            error, _ = await connection.request(wire.delete(space.full(parent), node.version))
            if not error:
                await prune_parents(connection, [parent], space)


def answer_error(error: int, path: str) -> MagnetarError:
    """For errors that no caller expects."""
    if error == LOST:
        return ConnectionLost(
            f"the connection to ZooKeeper ended before the answer for {path}; it may have been done"
        )
    if error in (ZooKeeperError.NO_AUTH, ZooKeeperError.AUTH_FAILED):
        return NotAuthorized(
            f"ZooKeeper refuses {path} to these credentials; see the setting metadata", path=path
        )
    if error == ZooKeeperError.THROTTLED:
        return TooManyRequests(f"ZooKeeper has too much to do for {path}; it was not done", path=path)
    return FinalError(f"ZooKeeper answered with error {error} for {path}", path=path, error=error)


# --- inside ----------------------------------------------------------------------------------------------------------


def _at(index: int, error: MagnetarError) -> MagnetarError:
    error.details["index"] = index
    return error


def _check_operation(index: int, operation: Operation) -> None:
    path = operation.path
    try:
        if not split_path(path):
            raise InvalidArgument("the root / has no value; name a node below it")
        if isinstance(operation, Create | Put) and len(operation.value) > MAX_VALUE_BYTES:
            raise InvalidArgument(
                f"the value of {path} has {len(operation.value)} bytes; at most {MAX_VALUE_BYTES} are allowed"
            )
        # ZooKeeper takes -1 for "whatever the version is".
        version = None if isinstance(operation, Create) else operation.version
        if version is not None and not 0 <= version <= _MAX_VERSION:
            raise VersionConflict(f"{path} cannot have version {version}", path=path)
    except MagnetarError as error:
        raise _at(index, error) from None


async def _send(connection: Connection, steps: Sequence[Step]) -> tuple[Step | None, int]:
    """The step that was refused, and its error; (None, 0) if all was done."""
    # A single Check has no request of its own.
    single = len(steps) == 1 and steps[0].request.opcode != wire.Opcode.CHECK
    request = steps[0].request if single else wire.multi([step.request for step in steps])
    if len(request.record) + 8 > MAX_REQUEST_BYTES:
        raise InvalidArgument(
            f"the commit has {len(request.record)} bytes; ZooKeeper takes {MAX_REQUEST_BYTES} at most: divide it"
        )
    error, frame = await connection.request(request)
    if error == LOST:
        raise answer_error(LOST, steps[0].path)
    if single:
        return (steps[0], error) if error else (None, 0)
    if error:
        return steps[0], error
    for step, error in zip(steps, wire.decode_multi_errors(frame)):
        if error not in (ZooKeeperError.OK, ZooKeeperError.RUNTIME_INCONSISTENCY):
            return step, error
    return None, 0


async def _learn(
    connection: Connection,
    operations: Sequence[Operation],
    space: Namespace,
    facts: Facts,
    step: Step,
    error: int,
) -> None:
    """Corrects the facts after a refusal, or raises what the commit failed with."""
    operation, path = operations[step.number], step.path
    match error:
        case ZooKeeperError.NO_NODE if step.pruned is not None:
            facts.below.pop(step.pruned, None)
        case ZooKeeperError.NO_NODE if isinstance(operation, Create) or (
            isinstance(operation, Check) and operation.version is None
        ):
            facts.implied.pop(path, None)
            await _find_missing_parents(connection, operation.path, space, facts)
        case ZooKeeperError.NO_NODE:
            raise NotFoundInStore(f"{path} does not exist", path=path)
        case ZooKeeperError.NODE_EXISTS if step.parent:
            facts.missing.discard(path)
        case ZooKeeperError.NODE_EXISTS:
            await _find_implied(connection, operation, space, facts)
        case ZooKeeperError.BAD_VERSION if step.pruned is not None:
            facts.below.pop(step.pruned, None)
        case ZooKeeperError.BAD_VERSION if path in facts.implied:
            del facts.implied[path]
        case ZooKeeperError.BAD_VERSION:
            await _raise_version_conflict(connection, operation, space)
        case ZooKeeperError.NOT_EMPTY:
            earlier = operations[: step.number]
            deleted = {before.path for before in earlier if isinstance(before, Delete)}
            target = step.pruned or path
            made = [before.path for before in earlier if isinstance(before, Create)]
            if any(below.startswith(f"{target}/") and below not in deleted for below in made):
                raise _not_empty(target)
            facts.below[target] = await _implied_below(connection, target, space, deleted)
        case ZooKeeperError.NO_CHILDREN_FOR_EPHEMERALS:
            raise InvalidArgument(f"{path} cannot be made: the node above it belongs to a session", path=path)
        case _:
            raise answer_error(error, path)


async def _read(connection: Connection, request: Request, path: str) -> Answer:
    error, frame = await connection.request(request)
    if error and error != ZooKeeperError.NO_NODE:
        raise answer_error(error, path)
    return error, frame


async def _find_missing_parents(connection: Connection, path: str, space: Namespace, facts: Facts) -> None:
    answers = {parent: connection.request(wire.exists(space.full(parent))) for parent in _ancestors(path)}
    for parent, answer in answers.items():
        error, _ = await answer
        if error == ZooKeeperError.NO_NODE:
            facts.missing.add(parent)
        elif error:
            raise answer_error(error, parent)
        else:
            facts.missing.discard(parent)


async def _find_implied(connection: Connection, operation: Operation, space: Namespace, facts: Facts) -> None:
    path = operation.path
    error, frame = await _read(connection, wire.get_data(space.full(path)), path)
    if error:  # it is gone again
        return
    node = wire.decode_data(frame)
    if node.value is None:
        facts.implied[path] = node.version
    elif isinstance(operation, Check):
        raise VersionConflict(f"{path} exists, and should not", path=path)
    else:
        raise AlreadyExists(f"{path} exists already", path=path)


async def _raise_version_conflict(connection: Connection, operation: Operation, space: Namespace) -> None:
    """Unless the version is the right one by now."""
    path = operation.path
    assert isinstance(operation, Put | Delete | Check)
    error, frame = await _read(connection, wire.get_data(space.full(path)), path)
    node = None if error else wire.decode_data(frame)
    if node is None or node.value is None:
        raise NotFoundInStore(f"{path} does not exist", path=path)
    if node.version == operation.version:
        found = "another version"
    else:
        found = f"version {node.version}, not {operation.version}"
    raise VersionConflict(f"{path} has {found}; read it again", path=path)


async def _implied_below(
    connection: Connection, path: str, space: Namespace, deleted: set[str]
) -> list[tuple[str, int]]:
    """The implied parents below a node, the deepest first. NodeNotEmpty if there is a real node that is not in `deleted`."""
    error, frame = await _read(connection, wire.get_data(space.full(path)), path)
    if error or wire.decode_data(frame).value is None:
        raise NotFoundInStore(f"{path} does not exist", path=path)
    found: list[tuple[str, int]] = []
    level = [path]
    while level:
        listings = [(parent, connection.request(wire.get_children(space.full(parent)))) for parent in level]
        below: list[str] = []
        for parent, listing in listings:
            error, frame = await listing
            if error and error != ZooKeeperError.NO_NODE:
                raise answer_error(error, parent)
            names = [] if error else wire.decode_children(frame)
            if len(names) > len(deleted) + MAX_PENDING:
                raise _not_empty(path)
            below += [f"{parent}/{space.name(name)}" for name in names]
        level = [child for child in below if child not in deleted]
        nodes = [(child, connection.request(wire.get_data(space.full(child)))) for child in level]
        for child, answer in nodes:
            error, frame = await answer
            if error == ZooKeeperError.NO_NODE:
                continue
            if error:
                raise answer_error(error, child)
            node = wire.decode_data(frame)
            if node.value is not None:
                raise _not_empty(path)
            found.append((child, node.version))
    return found[::-1]


def _not_empty(path: str) -> NodeNotEmpty:
    return NodeNotEmpty(f"{path} has nodes below it; delete those first", path=path)
