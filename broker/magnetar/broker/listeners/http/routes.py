"""A path is one row: method, template, the operation, and what becomes of its result.

An operation is a method of the service (`service.operations`), or a function whose first parameter is the request (`Asked`).
Its parameters say the rest. One that the template names comes from there, the one that the row calls `body` is the JSON of
the body, those `given` are the row's, and all others are of the query, as Java writes their names (`message_position`:
`messagePosition`). Each is converted to its type; a place in a topic (`Start`) comes from a time, or a message id of Pulsar.

    Route("POST", f"{TOPIC}/subscription/{{subscription}}/skip/{{count}}", BrokerService.skip_messages, answer=nothing)

calls `service.skip_messages(asked, "persistent://acme/one/plain", subscription="s1", count=5)`.

A topic may be partitioned. What the row says of `partitions` is done then: nothing (WHOLE: the operation knows), refuse it
(REFUSED), or ask each partition at its owner, and join the answers by name of the partition.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_type_hints
from urllib.parse import quote, unquote, urlencode

import msgspec
from aiohttp import web

from magnetar.proto.errors import MalformedFrame, MessageLost, TopicNotFound
from magnetar.proto.ids import MessageId, TopicName
from magnetar.proto.pulsar.ids import unpack_entry

from ...log.positions import Start
from ...service.admin import Owner
from ...service.broker import BrokerService
from ...service.operations import OPERATIONS

if TYPE_CHECKING:
    from aiohttp import web

TOPIC: Final = "/admin/v2/{domain}/{tenant}/{namespace}/{topic}"
NAMESPACE: Final = "/admin/v2/namespaces/{tenant}/{namespace}"
Join = Callable[[Mapping[str, Any], "Asked"], Any]
KEYS: Final = "*"  # as `body` of a row: parameters are the keys of an object
_MISSING: Final = inspect.Parameter.empty
_LATEST = (1 << 63) - 1


def nothing(*_: Any) -> None:
    """The answer of what is done when it is answered. Also joins such answers."""


def WHOLE(answers: Mapping[str, Any], asked: Asked) -> None:  # noqa: N802
    """Of `Route.partitions`."""


def REFUSED(answers: Mapping[str, Any], asked: Asked) -> None:  # noqa: N802
    """Of `Route.partitions`."""


def text(found: str | None) -> web.Response | None:
    """A text as it is, which Pulsar calls JSON all the same: its tools would print the quotes of JSON."""
    return None if found is None else web.Response(text=found, content_type="application/json")


class PulsarMessageId(msgspec.Struct, rename="camel"):
    """Ledger -1 is the beginning of the topic, the largest number its end."""

    ledger_id: int
    entry_id: int
    batch_index: int = -1
    excluded: bool = False  # the place behind it is meant
    properties: dict[str, str] | None = None  # of a subscription that is to begin there

    async def start(self, asked: Asked) -> Start:
        """What it means here."""
        if self.ledger_id < 0 or self.ledger_id == _LATEST:
            return "earliest" if self.ledger_id < 0 else "latest", None
        entry, index = unpack_entry(max(self.entry_id, 0))
        index += max(self.batch_index, 0)
        if self.excluded:
            end = index + 1
            if self.batch_index < 0:  # behind all of its batch
                with suppress(MessageLost, TopicNotFound):
                    found = await asked.service.admin.message(
                        asked, asked.topic, self.ledger_id, entry, index
                    )
                    end = found.batch[1]
            index = end
        return "id", MessageId(self.ledger_id, entry, index).to_bytes()


class Elsewhere(Exception):
    """Another broker serves the topic."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner.http)
        self.owner = owner

    def location(self, asked: Asked) -> str:
        """Of the same request there."""
        quoted = {name: quote(text, safe="") for name, text in asked.names.items()}
        query = urlencode({**asked.query, "authoritative": str(not self.owner.final).lower()})
        return f"{self.owner.http}{asked.route.path.format_map(quoted)}?{query}"


@dataclass(frozen=True)
class Asked:
    """A request for a row: the `Caller` of its operation."""

    service: BrokerService
    # The answers of requests by topic, each from its owner, without those that have nothing of a name, unless all have not.
    # Rule 48: all are asked; the first error is raised then.
    each: Callable[[Iterable[Asked]], Awaitable[dict[str, Any]]]
    route: Route
    names: Mapping[str, str]  # what stands in the path, decoded
    query: Mapping[str, str]
    body: bytes = b""
    request: web.Request | None = (
        None  # for those whose answer is a stream; None: another request asks this one
    )

    @property
    def topic(self) -> str:
        """Its full name; not checked yet."""
        return "{domain}://{tenant}/{namespace}/{topic}".format_map({"domain": "persistent", **self.names})

    @property
    def namespace(self) -> str:
        """tenant/namespace; not checked yet."""
        return "{tenant}/{namespace}".format_map(self.names)

    @property
    def tenant(self) -> str:
        """Not checked yet."""
        return self.names["tenant"]

    @property
    def authoritative(self) -> bool:
        """Another broker says that this one is to take the topic's bundle."""
        return self.query.get("authoritative") == "true"

    def about(
        self, route: Route, topic: str, query: Mapping[str, str], body: bytes = b"", **names: str
    ) -> Asked:
        """A request for a row about a topic, by its full name."""
        found = TopicName.parse(topic)._asdict()
        names |= {**found, "topic": found.pop("name")}
        return Asked(self.service, self.each, route, {**self.names, **names}, query, body)

    async def of_partitions(
        self, numbers: Iterable[int], route: Route | None = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Asks partitions of the topic the same, or for another row, as `each`."""
        whole, given = TopicName.parse(self.topic), self.query if query is None else query
        topics = (str(whole.partition_of(number)) for number in numbers)
        return await self.each(self.about(route or self.route, one, given, self.body) for one in topics)

    def authorize(self, operation: str, resource: str) -> None:
        """Whoever reaches the port may do everything, as with the native protocol without credentials."""


class Argument(NamedTuple):
    """A parameter of an operation."""

    name: str
    asked: str  # its name in the path or the query
    place: str  # "path", "query", "body", or "key" of an object in the body
    type: Any
    default: Any  # _MISSING: it must be given

    @property
    def required(self) -> bool:
        """Without it the request is refused."""
        return self.default is _MISSING

    def value(self, asked: Asked) -> Any:
        """_MISSING: it is not given, and needs not to be. Raises MalformedFrame."""
        what = "the body" if self.place in ("body", "key") else self.asked
        is_start = self.type == Start
        try:
            if self.place == "body" and asked.body:
                wanted = PulsarMessageId if is_start else self.type
                return msgspec.json.decode(asked.body, type=wanted, strict=False)
            if self.place == "key":
                given = msgspec.json.decode(asked.body or b"{}", type=dict[str, Any]).get(self.asked)
            else:
                given = (asked.names if self.place == "path" else asked.query).get(self.asked)
            if given is not None:
                return ("time", int(given)) if is_start else msgspec.convert(given, self.type, strict=False)
        except (ValueError, msgspec.MsgspecError) as error:
            raise MalformedFrame(f"{what} is not as it is wanted here: {error}") from None
        if self.required:
            raise MalformedFrame(
                f"this needs {'a body of JSON' if self.place == 'body' else self.asked + '=...'}"
            )
        return _MISSING


@dataclass(frozen=True)
class Route:
    """A row."""

    method: str
    path: str
    operation: Callable[..., Awaitable[Any]]
    body: str = ""  # the parameter that is the body, or KEYS
    answer: Callable[[Any], Any] | None = None  # from the result to what is JSON; None: the result is
    partitions: Join = REFUSED
    status: int = 0  # when it is done; 0: 200 with an answer or for GET, else 204
    given: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def resource(self) -> str:
        """What the operation gets before its arguments: "topic", "namespace", "tenant" or ""."""
        name = getattr(self.operation, "__qualname__", "")
        found = OPERATIONS[name].resource if name in OPERATIONS else ""
        return "" if found == "cluster" else found

    @property
    def of_topic(self) -> bool:
        """False: it is the same at every broker."""
        return "{topic}" in self.path

    @property
    def doc(self) -> str:
        """The first paragraph that the operation says of itself."""
        return (inspect.getdoc(self.operation) or "").partition("\n\n")[0].replace("\n", " ")

    @cached_property
    def arguments(self) -> list[Argument]:
        """Those that a request gives."""
        types = get_type_hints(self.operation)
        parameters = list(inspect.signature(self.operation).parameters.values())[2 if self.resource else 1 :]
        return [self._argument(one, types[one.name]) for one in parameters if one.name not in self.given]

    def _argument(self, parameter: inspect.Parameter, type: Any) -> Argument:
        first, *others = parameter.name.split("_")
        name = first + "".join(word.title() for word in others)
        place = "body" if parameter.name == self.body else "key" if self.body == KEYS else "query"
        place = "path" if f"{{{name}}}" in self.path else place
        return Argument(parameter.name, name, place, type, parameter.default)

    async def run(self, asked: Asked) -> Any:
        """The answer. Raises MalformedFrame for arguments that are not as the operation wants them, or what it raises."""
        arguments = dict(self.given)
        for one in self.arguments:
            value = one.value(asked)
            if one.type == Start and isinstance(value, PulsarMessageId):
                value = await value.start(asked)
            if value is not _MISSING:
                arguments[one.name] = value
        owner, _, method = getattr(self.operation, "__qualname__", "").partition(".")
        if f"{owner}.{method}" in OPERATIONS:
            parts = (asked.service, *vars(asked.service).values())
            holder = next(part for part in parts if type(part).__name__ == owner)
            of = [getattr(asked, self.resource)] if self.resource else []
            found = await self.operation(holder, asked, *of, **arguments)
        else:
            found = await self.operation(asked, **arguments)
        return found if self.answer is None else self.answer(found)


class _Node:
    __slots__ = ("below", "rows")

    def __init__(self) -> None:
        self.below: dict[str, _Node] = {}  # by segment; "": any
        self.rows: dict[str, Route] = {}  # by method

    def find(self, segments: list[str]) -> Mapping[str, Route]:
        """Of a path below this one."""
        if not segments:
            return self.rows
        first, *others = segments
        keys = (first, "") if first else ()
        return next(
            (found for key in keys if key in self.below and (found := self.below[key].find(others))), {}
        )


class Table:
    """Rows by path. A literal comes before a name; of what begins alike the row is found whose end fits.

    >>> async def list(asked: Asked) -> None: ...
    >>> table = Table([Route("GET", "/t/{a}", list), Route("GET", "/t/all/{b}", list)])
    >>> table.find(["t", "all"])["GET"].path, table.find(["t"])
    ('/t/{a}', {})
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

    def find(self, segments: list[str]) -> Mapping[str, Route]:
        """By method; empty: there is no such path."""
        return self._root.find(segments)


def names_in(row: Route, segments: list[str]) -> dict[str, str]:
    """What a path that was found says, under the names of the row's template. Pulsar's tools encode subscriptions twice."""
    parts = row.path.strip("/").split("/")
    names = {part[1:-1]: text for part, text in zip(parts, segments, strict=True) if part[0] == "{"}
    if "subscription" in names:
        names["subscription"] = unquote(names["subscription"], errors="strict")
    return names
