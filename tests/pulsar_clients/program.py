"""What a scenario is given: clients, names of its own, and the means to say what it saw so that it can be compared.

A scenario is a function of a `Program` and returns what it saw, as JSON but for `Id`s, which `comparable` turns into
ordinals: "0", "1"... for the entries of a topic in the order of their ids, with the index in the batch: "1[0]", and the
partition: "1@2". Names of topics are without what makes them unique. So nothing in a trace is of one run, or one service.

Only the standard library and `pulsar` are imported: older versions of `pulsar-client` run scenarios in an environment of
their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pulsar

WAIT_MS = 20_000  # for what must come
NOTHING_MS = 300  # for what must not
# Where subscriptions begin that the administration makes.
EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
LATEST = dict.fromkeys(("ledgerId", "entryId"), (1 << 63) - 1) | {"partitionIndex": -1}
_SAID_MS = 8_000
_LONGEST = 200  # of a payload that stands in a trace as it is

Scenario = Callable[["Program"], Any]
SCENARIOS: dict[str, Scenario] = {}
SHORT: set[str] = set()  # those of `make test`
SLOW: set[str] = set()


def scenario(function: Scenario) -> Scenario:
    """Registers a function by its name."""
    assert function.__name__ not in SCENARIOS, function.__name__
    SCENARIOS[function.__name__] = function
    return function


def slow(function: Scenario) -> Scenario:
    """Registers a scenario that takes ten seconds or more, which has a process with others of its kind."""
    SLOW.add(function.__name__)
    return scenario(function)


def short(function: Scenario) -> Scenario:
    """Registers a scenario that is also one of `make test`."""
    SHORT.add(function.__name__)
    return scenario(function)


class Id(NamedTuple):
    """Of a message."""

    topic: str
    partition: int
    ledger: int
    entry: int
    batch_index: int


class Answer(NamedTuple):
    """Of the administration."""

    status: int
    body: Any


class Admin:
    """The administration by HTTP, Pulsar's paths."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/admin/v2"

    def __call__(self, method: str, path: str, body: Any = None) -> Answer:
        request = urllib.request.Request(
            f"{self._url}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Answer(answer.status, _json(answer.read()))
        except urllib.error.HTTPError as error:
            return Answer(error.code, _json(error.read()))

    def must(self, method: str, path: str, body: Any = None) -> Any:
        """The body of an answer that is no error."""
        answer = self(method, path, body)
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {answer.body}")
        return answer.body


def _json(text: bytes) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text.decode(errors="replace")


class Program:
    """One scenario, with one client."""

    def __init__(self, name: str, run: str, url: str, http: str, client: Callable[..., Any]) -> None:
        """`run` tells this run from others on the same service; `client` is called as `pulsar.Client`."""
        self.name = name
        self.url = url
        self.admin = Admin(http)
        self._unique = f"{name}-{run}"
        self._open = client
        self._clients: list[Any] = []
        self._kept: list[Any] = []  # what nobody holds is closed
        self._named: set[str] = set()  # producers whose name the scenario gave

    # What it works with.

    def client(self, url: str = "", **settings: Any) -> Any:
        """One more client."""
        client = self._open(url or self.url, logger=pulsar.ConsoleLogger(), **settings)
        self._clients.append(client)
        return client

    @property
    def shared_client(self) -> Any:
        """The client of all that asks for no other one."""
        return self._clients[0] if self._clients else self.client()

    def producer(self, topic: str, *, client: Any = None, **settings: Any) -> Any:
        if "producer_name" in settings:
            self._named.add(settings["producer_name"])
        return self._keep((client or self.shared_client).create_producer(topic, **settings))

    def consumer(
        self,
        topic: Any,
        subscription: str = "s",
        *,
        client: Any = None,
        latest: bool = False,
        **settings: Any,
    ) -> Any:
        """From the earliest message on, unless it is said otherwise."""
        position = pulsar.InitialPosition.Latest if latest else pulsar.InitialPosition.Earliest
        settings = {"initial_position": position, **settings}
        return self._keep((client or self.shared_client).subscribe(topic, subscription, **settings))

    def reader(self, topic: str, start: Any = None, *, client: Any = None, **settings: Any) -> Any:
        start = pulsar.MessageId.earliest if start is None else start
        return self._keep((client or self.shared_client).create_reader(topic, start, **settings))

    def _keep(self, resource: Any) -> Any:
        self._kept.append(resource)
        return resource

    def topic(self, name: str = "t", domain: str = "persistent", namespace: str = "public/default") -> str:
        """A topic of this scenario alone."""
        return f"{domain}://{namespace}/{self._unique}-{name}"

    def namespace(self, name: str = "n", **policies: Any) -> str:
        """A new namespace of this scenario alone. `policies`: bodies by the end of their paths."""
        namespace = f"public/{self._unique}-{name}"
        self.admin.must("PUT", f"namespaces/{namespace}", {})
        for policy, value in policies.items():
            self.admin.must("POST", f"namespaces/{namespace}/{policy}", value)
        return namespace

    def partitioned(self, count: int, name: str = "t") -> str:
        """A topic of so many partitions."""
        topic = self.topic(name)
        self.admin.must("PUT", f"{path(topic)}/partitions", count)
        return topic

    def close(self) -> None:
        for client in self._clients:
            with contextlib.suppress(Exception):
                client.close()

    # What it does.

    def send(self, producer: Any, *contents: Any, **named: Any) -> list[Id]:
        """One after another."""
        return [self.id(producer.send(_bytes(content), **named), producer.topic()) for content in contents]

    def send_all(self, producer: Any, messages: Iterable[Any], *, flush: bool = True) -> list[Any]:
        """Without waiting in between: contents, or (content, what else `send` takes). An id, or an error's name, of each."""
        given = [one if isinstance(one, tuple) else (one, {}) for one in messages]
        answers: list[Any] = [None] * len(given)
        done = threading.Semaphore(0)

        def answered(number: int, result: Any, sent: Any) -> None:
            answers[number] = self.id(sent, producer.topic()) if result == pulsar.Result.Ok else result.name
            done.release()

        for number, (content, named) in enumerate(given):
            producer.send_async(
                _bytes(content), lambda result, sent, at=number: answered(at, result, sent), **named
            )
        if flush:
            producer.flush()
        for _ in given:
            if not done.acquire(timeout=WAIT_MS / 1000):
                raise TimeoutError(f"{answers.count(None)} messages were not answered")
        return answers

    def receive(self, consumer: Any, count: int, *, ack: bool = True, **kept: bool) -> list[Any]:
        """The next messages, as `seen` says."""
        found: list[Any] = []
        for _ in range(count):
            message = self.next(consumer, f"{len(found)} of {count} messages came, {found[-3:]}")
            found.append(self.seen(message, **kept))
            if ack:
                consumer.acknowledge(message)
        return found

    def next(self, consumer: Any, otherwise: str = "no message came") -> Any:
        """The next message itself."""
        try:
            return getattr(consumer, "receive" if hasattr(consumer, "receive") else "read_next")(WAIT_MS)
        except Exception as error:
            raise RuntimeError(f"{error_name(error)}: {otherwise}") from error

    def read(self, reader: Any, **kept: bool) -> list[Any]:
        """All messages that the reader says to be available; some versions say so where none is."""
        found: list[Any] = []
        while reader.has_message_available():
            try:
                found.append(self.seen(reader.read_next(_SAID_MS), **kept))
            except Exception as error:
                return [*found, f"one is said to be available: {error_name(error)}"]
        return found

    def nothing(self, consumer: Any) -> Any:
        """ "nothing", unless a message comes."""
        try:
            return self.seen(
                getattr(consumer, "receive" if hasattr(consumer, "receive") else "read_next")(NOTHING_MS)
            )
        except Exception as error:
            return "nothing" if error_name(error) == "Timeout" else error_name(error)

    def fails(self, call: Callable[..., Any], *given: Any, **named: Any) -> str:
        """The name of the error; "no error"."""
        try:
            call(*given, **named)
        except Exception as error:
            refuse_unsupported(error)
            return error_name(error)
        return "no error"

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Asks until the answer is true, and returns it."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while not (answer := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"it did not come to be that {what}: {condition()!r}")
            time.sleep(0.05)
        return answer

    def stats(self, topic: str) -> Any:
        return self.admin.must("GET", f"{path(topic)}/stats")

    def backlog(self, topic: str, subscription: str = "s") -> int:
        return int(self.stats(topic)["subscriptions"][subscription]["msgBacklog"])

    # What it saw.

    def id(self, message_id: Any, topic: str) -> Id:
        partition, ledger = message_id.partition(), message_id.ledger_id()
        base = re.sub(r"-partition-\d+$", "", topic)
        return Id(base, partition, ledger, message_id.entry_id(), message_id.batch_index())

    def seen(self, message: Any, *, ids: bool = True, topics: bool = False, plain: bool = False) -> Any:
        """A message, with what it has. `plain`: the content alone."""
        data = message.data()
        shown = data.decode(errors="backslashreplace")
        if len(data) > _LONGEST:
            shown = f"{len(data)} bytes, {hashlib.sha256(data).hexdigest()[:16]}"
        if plain:
            return shown
        found: dict[str, Any] = {"data": shown}
        if ids:
            found["id"] = self.id(message.message_id(), message.topic_name())
        if topics:
            found["topic"] = self.shown(message.topic_name())
        if producer := self._producer_name(message):
            found["producer"] = producer
        rest = {
            "properties": dict(message.properties()),
            "key": message.partition_key(),
            "ordering_key": message.ordering_key(),
            "event": message.event_timestamp(),
            "redelivered": message.redelivery_count(),
        }
        return found | {name: value for name, value in rest.items() if value}

    def _producer_name(self, message: Any) -> str:
        name = message.producer_name() if hasattr(message, "producer_name") else ""
        return name if name in self._named else ""

    def shown(self, topic: str) -> str:
        """The name of a topic without what is unique.

        >>> Program("a", "7f", "", "", None).shown("persistent://public/default/a-7f-t-partition-1")
        'persistent://public/default/t-partition-1'
        """
        return topic.replace(f"{self._unique}-", "")


@contextlib.contextmanager
def in_thread(call: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Runs `call` beside the block; what is given returns its result, and waits for it."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error_name(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(WAIT_MS / 1000)
        return results[0] if results else "it did not end"

    yield result
    result()


class Unsupported(Exception):
    """This client has no such thing."""


def refuse_unsupported(error: Exception) -> None:
    """Raises Unsupported if it is what an error means."""
    missing = re.search(r"unexpected keyword argument '(\w+)'|has no attribute '(\w+)'", str(error))
    if isinstance(error, TypeError | AttributeError) and missing:
        raise Unsupported(f"there is no `{missing[1] or missing[2]}`") from error


def error_name(error: BaseException) -> str:
    """As the blocking client's classes and the asyncio client's results have it."""
    result = getattr(error, "error", None)
    return str(result().name) if callable(result) else type(error).__name__


def path(topic: str) -> str:
    """Of the administration.

    >>> path("persistent://public/default/t")
    'persistent/public/default/t'
    """
    return topic.replace("://", "/")


def comparable(seen: Any) -> Any:
    """A trace as JSON, with ids as ordinals."""
    entries: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for one in _ids(seen):
        entries.setdefault((one.topic, one.partition), set()).add((one.ledger, one.entry))
    ordinals = {
        topic: {entry: at for at, entry in enumerate(sorted(found))} for topic, found in entries.items()
    }

    def shown(found: Any) -> Any:
        if isinstance(found, Id):
            return _shown(found, ordinals[found.topic, found.partition])
        if isinstance(found, Mapping):
            return {str(name): shown(one) for name, one in found.items()}
        if isinstance(found, list | tuple):
            return [shown(one) for one in found]
        return found

    return shown(seen)


def _shown(found: Id, ordinals: Mapping[tuple[int, int], int]) -> str:
    batch = "" if found.batch_index < 0 else f"[{found.batch_index}]"
    partition = "" if found.partition < 0 else f"@{found.partition}"
    if found.entry < 0:
        return f"none{batch}{partition}"
    return f"{ordinals[found.ledger, found.entry]}{batch}{partition}"


def _ids(seen: Any) -> Iterator[Id]:
    if isinstance(seen, Id):
        if seen.entry >= 0:
            yield seen
    elif isinstance(seen, Mapping):
        for one in seen.values():
            yield from _ids(one)
    elif isinstance(seen, list | tuple):
        for one in seen:
            yield from _ids(one)


def _bytes(content: Any) -> Any:
    return content.encode() if isinstance(content, str) else content
