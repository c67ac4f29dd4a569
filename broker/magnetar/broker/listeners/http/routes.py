"""A path is one row: method, template, the operation, and what becomes of its result.

An operation is a method of the service (`service.operations`), or a function whose first parameter is the request (`Asked`).
Its parameters say the rest. One that the template names comes from there, the one that the row calls `body` is the JSON of
the body, and all others are of the query, under their name as Java writes it (`get_precise_backlog`: `getPreciseBacklog`);
each is converted to its type. For example

    Route("POST", f"{TOPIC}/subscription/{{subscription}}/skip/{{count}}", BrokerService.skip_messages, answer=nothing)

calls `service.skip_messages(asked, "persistent://acme/one/plain", subscription="s1", count=5)`.

A topic may be partitioned. What the row says of `partitions` is done then: nothing (WHOLE: the operation knows), refuse it
(REFUSED), or ask each partition at its owner, and join the answers by name of the partition.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol, get_type_hints
from urllib.parse import quote, urlencode

import msgspec

from magnetar.proto.errors import MalformedFrame
from magnetar.proto.ids import TopicName

from ...service.admin import Owner
from ...service.broker import BrokerService
from ...service.operations import OPERATIONS

TOPIC: Final = "/admin/v2/{domain}/{tenant}/{namespace}/{topic}"
NAMESPACE: Final = "/admin/v2/namespaces/{tenant}/{namespace}"

Join = Callable[[Mapping[str, Any], "Asked"], Any]


def nothing(*_: Any) -> None:
    """The answer of what is done when it is answered. Also joins such answers."""


def WHOLE(answers: Mapping[str, Any], asked: Asked) -> None:  # noqa: N802
    """Of `Route.partitions`."""


def REFUSED(answers: Mapping[str, Any], asked: Asked) -> None:  # noqa: N802
    """Of `Route.partitions`."""


class Elsewhere(Exception):
    """Another broker serves the topic."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner.http)
        self.owner = owner

    def location(self, asked: Asked) -> str:
        """Of the same request there."""
        path = "/".join(
            quote(asked.names[part[1:-1]], safe="") if part[:1] == "{" else part
            for part in asked.route.path.split("/")
        )
        query = {**asked.query, "authoritative": str(not self.owner.final).lower()}
        return f"{self.owner.http}{path}?{urlencode(query)}"


class Partitions(Protocol):
    """Asks a request of partitions of its topic, wherever they are."""

    async def of_partitions(self, asked: Asked, numbers: Iterable[int]) -> dict[str, Any]:
        """The answers by full name, without those that have nothing of the name that was asked for, unless all have not.

        Rule 48: all are asked; the first error is raised then.
        """


class Asked:
    """A request for a row: the `Caller` of its operation."""

    def __init__(
        self,
        service: BrokerService,
        partitions: Partitions,
        route: Route,
        names: Mapping[str, str],
        query: Mapping[str, str],
        body: bytes = b"",
    ) -> None:
        """`names`: what stands in the path, decoded."""
        self.service = service
        self.route = route
        self.names = names
        self.query = query
        self.body = body
        self._partitions = partitions

    @property
    def topic(self) -> str:
        """Its full name; not checked yet."""
        return "{domain}://{tenant}/{namespace}/{topic}".format_map(self.names)

    @property
    def namespace(self) -> str:
        """tenant/namespace; not checked yet."""
        return "{tenant}/{namespace}".format_map(self.names)

    @property
    def authoritative(self) -> bool:
        """Another broker says that this one is to take the topic's bundle."""
        return self.query.get("authoritative") == "true"

    def partition(self, number: int) -> Asked:
        """The same request for a partition of the topic."""
        names = {**self.names, "topic": TopicName.parse(self.topic).partition_of(number).name}
        return Asked(self.service, self._partitions, self.route, names, self.query, self.body)

    async def ask(self, route: Route, numbers: Iterable[int], **query: str) -> dict[str, Any]:
        """Another row, for partitions of the topic."""
        asked = Asked(self.service, self._partitions, route, self.names, query)
        return await self._partitions.of_partitions(asked, numbers)

    def authorize(self, operation: str, resource: str) -> None:
        """Whoever reaches the port may do everything, as with the native protocol without credentials."""


class Argument(NamedTuple):
    """A parameter of an operation."""

    name: str
    asked: str  # its name in the path or the query
    place: str  # "path", "query" or "body"
    type: Any
    default: Any  # inspect.Parameter.empty: it must be given


@dataclass(frozen=True)
class Route:
    """A row."""

    method: str
    path: str
    operation: Callable[..., Awaitable[Any]]
    body: str = ""  # the parameter that is the body
    answer: Callable[[Any], Any] | None = None  # from the result to what is JSON; None: the result is
    partitions: Join = REFUSED
    status: int = 0  # when it is done; 0: 200 with an answer or for GET, else 204

    @cached_property
    def _of_service(self) -> str:
        """The class whose method the operation is; "": a function."""
        name: str = getattr(self.operation, "__qualname__", "")
        return name.partition(".")[0] if name in OPERATIONS else ""

    @cached_property
    def resource(self) -> str:
        """What the path says the operation is about: "topic", "namespace" or ""."""
        return "topic" if "{topic}" in self.path else "namespace" if "{namespace}" in self.path else ""

    @cached_property
    def arguments(self) -> list[Argument]:
        """Those that a request gives."""
        types = get_type_hints(self.operation)
        parameters = list(inspect.signature(self.operation).parameters.values())
        own = 2 if self._of_service and self._kind != "cluster" else 1
        return [self._argument(one, types[one.name]) for one in parameters[own:]]

    @property
    def _kind(self) -> str:
        return OPERATIONS[self.operation.__qualname__].resource

    def _argument(self, parameter: inspect.Parameter, type: Any) -> Argument:
        first, *others = parameter.name.split("_")
        name = first + "".join(word.title() for word in others)
        place = "body" if parameter.name == self.body else "query"
        if f"{{{name}}}" in self.path:
            place = "path"
        return Argument(parameter.name, name, place, type, parameter.default)

    @cached_property
    def doc(self) -> str:
        """The first sentences of the operation, for people."""
        return (inspect.getdoc(self.operation) or "").partition("\n\n")[0].replace("\n", " ")

    async def run(self, asked: Asked) -> Any:
        """The answer. Raises MalformedFrame for arguments that are not as the operation wants them, or what it raises."""
        arguments = {}
        for one in self.arguments:
            if (value := _value(one, asked)) is not inspect.Parameter.empty:
                arguments[one.name] = value
        if not self._of_service:
            found = await self.operation(asked, **arguments)
        else:
            of = [] if self._kind == "cluster" else [getattr(asked, self._kind)]
            found = await self.operation(_holder(asked.service, self._of_service), asked, *of, **arguments)
        return found if self.answer is None else self.answer(found)


def _holder(service: BrokerService, name: str) -> object:
    """The part of the service of this class."""
    if name == type(service).__name__:
        return service
    return next(part for part in vars(service).values() if type(part).__name__ == name)


def _value(argument: Argument, asked: Asked) -> Any:
    """Parameter.empty: it is not given, and needs not to be."""
    missing = inspect.Parameter.empty
    if argument.place == "body":
        if asked.body:
            try:
                return msgspec.json.decode(asked.body, type=argument.type, strict=False)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise MalformedFrame(f"the body is not the JSON that is wanted here: {error}") from None
        what = "a body of JSON"
    else:
        given = (asked.names if argument.place == "path" else asked.query).get(argument.asked)
        if given is not None:
            try:
                return msgspec.convert(given, argument.type, strict=False)
            except msgspec.ValidationError as error:
                raise MalformedFrame(f"{argument.asked}={given[:80]}: {error}") from None
        what = f"{argument.asked}=... in the query"
    if argument.default is missing:
        raise MalformedFrame(f"this needs {what}")
    return missing


class Found(NamedTuple):
    """The rows of a path, by method, and what its segments are."""

    rows: Mapping[str, Route]
    segments: list[str]

    def names(self, row: Route) -> dict[str, str]:
        """What the path says, under the names of the row's template."""
        parts = row.path.strip("/").split("/")
        return {
            part[1:-1]: segment for part, segment in zip(parts, self.segments, strict=True) if part[0] == "{"
        }


class Table:
    """Rows by path. A literal comes before a name; of what begins alike the row is found whose end fits.

    >>> async def list(asked: Asked) -> None: ...
    >>> table = Table([Route("GET", "/t/{a}", list), Route("GET", "/t/all/{b}", list)])
    >>> table.find(["t", "all"]).segments, table.find(["t"])
    (['t', 'all'], None)
    """

    def __init__(self, rows: Iterable[Route]) -> None:
        self.rows = list(rows)
        self._root = _Node()
        for row in self.rows:
            for domain in ("persistent", "non-persistent") if "{domain}" in row.path else ("",):
                node = self._root
                for part in row.path.replace("{domain}", domain).strip("/").split("/"):
                    node = node.below.setdefault("" if part[0] == "{" else part, _Node())
                assert row.method not in node.rows, f"two rows for {row.method} {row.path}"
                node.rows[row.method] = row

    def find(self, segments: list[str]) -> Found | None:
        """None: there is no such path."""
        rows = _find(self._root, segments, 0)
        return None if rows is None else Found(rows, segments)


class _Node:
    __slots__ = ("below", "rows")

    def __init__(self) -> None:
        self.below: dict[str, _Node] = {}  # by segment; "": any
        self.rows: dict[str, Route] = {}


def _find(node: _Node, segments: list[str], at: int) -> Mapping[str, Route] | None:
    if at == len(segments):
        return node.rows or None
    for key in (segments[at], "") if segments[at] else ():
        below = node.below.get(key)
        if below is not None and (found := _find(below, segments, at + 1)) is not None:
            return found
    return None
