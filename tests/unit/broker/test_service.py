"""The service layer: every operation is authorized, and none that is refused does anything."""

import contextlib
import inspect
from typing import Any, get_type_hints

import pytest

from magnetar.broker.dispatch.subscription import SubscribeRequest
from magnetar.broker.listeners.native.requests import REQUESTS, to_wire
from magnetar.broker.service.admin import AdminService
from magnetar.broker.service.broker import MAX_TOPICS_PER_PAGE, BrokerService
from magnetar.broker.service.ledgers import LedgerService
from magnetar.broker.service.operations import OPERATIONS, Operation
from magnetar.broker.service.schemas import SchemaService
from magnetar.broker.service.stored import StoredService
from magnetar.broker.service.tenancy import TenancyService
from magnetar.proto.errors import InvalidArgument, MagnetarError, NotAuthorized
from support.broker_kit import FakeClient, running_broker
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore

TOPIC = "topic"
CONSUMER = "topic of the consumer"


class Everyone:
    """May do everything."""

    def authorize(self, operation: str, resource: str) -> None:
        """Allows it."""


class Nobody:
    """May do nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def authorize(self, operation: str, resource: str) -> None:
        """Refuses it."""
        self.asked.append((operation, resource))
        raise NotAuthorized(f"{operation} on {resource}")


def public_operations(*services: type) -> dict[str, Any]:
    """Everything that a listener can await, by its qualified name."""
    return {
        f"{service.__name__}.{name}": method
        for service in services
        for name, method in inspect.getmembers(service, inspect.isroutine)
        if not name.startswith("_")
    }


def test_the_table_of_operations() -> None:
    assert dict(OPERATIONS) == {
        "AdminService.owner": Operation("lookup", TOPIC),
        "AdminService.bundle_range": Operation("lookup", TOPIC),
        "AdminService.unload_topic": Operation("unload_topic", TOPIC),
        "AdminService.topics": Operation("list_topics", "namespace"),
        "AdminService.partitioned": Operation("lookup", TOPIC),
        "AdminService.figures": Operation("topic_stats", TOPIC),
        "AdminService.message": Operation("peek_messages", TOPIC),
        "AdminService.examine": Operation("peek_messages", TOPIC),
        "AdminService.last_message": Operation("topic_stats", TOPIC),
        "AdminService.find": Operation("topic_stats", TOPIC),
        "AdminService.expire_older": Operation("expire_messages", TOPIC),
        "AdminService.expire_before": Operation("expire_messages", TOPIC),
        "AdminService.analyze_backlog": Operation("peek_messages", TOPIC),
        "AdminService.backlog_size": Operation("topic_stats", TOPIC),
        "AdminService.trim": Operation("trim_topic", TOPIC),
        "AdminService.truncate": Operation("delete_topic", TOPIC),
        "AdminService.properties": Operation("topic_stats", TOPIC),
        "AdminService.change_properties": Operation("create_topic", TOPIC),
        "AdminService.subscription_properties": Operation("topic_stats", TOPIC),
        "AdminService.set_subscription_properties": Operation("create_subscription", TOPIC),
        "LedgerService.topic_ledgers": Operation("topic_ledgers", TOPIC),
        "LedgerService.keep_ledgers": Operation("keep_ledgers", TOPIC),
        "LedgerService.create_staged_ledger": Operation("stage_ledgers", TOPIC),
        "LedgerService.get_ledger_metadata": Operation("topic_ledgers", TOPIC),
        "LedgerService.put_ledger_metadata": Operation("stage_ledgers", TOPIC),
        "LedgerService.keep_staged": Operation("stage_ledgers", TOPIC),
        "LedgerService.discard_staged": Operation("stage_ledgers", TOPIC),
        "LedgerService.attach_ledgers": Operation("attach_ledgers", TOPIC),
        "LedgerService.last_batch": Operation("attach_ledgers", TOPIC),
        "LedgerService.report_damage": Operation("report_damage", TOPIC),
        "LedgerService.archive_ledgers": Operation("archive_ledgers", TOPIC),
        "TenancyService.clusters": Operation("list_clusters", "cluster"),
        "TenancyService.cluster": Operation("list_clusters", "cluster"),
        "TenancyService.create_cluster": Operation("change_clusters", "cluster"),
        "TenancyService.update_cluster": Operation("change_clusters", "cluster"),
        "TenancyService.set_peer_clusters": Operation("change_clusters", "cluster"),
        "TenancyService.delete_cluster": Operation("change_clusters", "cluster"),
        "TenancyService.tenants": Operation("list_tenants", "cluster"),
        "TenancyService.tenant": Operation("get_tenant", "tenant"),
        "TenancyService.create_tenant": Operation("change_tenants", "tenant"),
        "TenancyService.update_tenant": Operation("change_tenants", "tenant"),
        "TenancyService.delete_tenant": Operation("change_tenants", "tenant"),
        "TenancyService.namespaces": Operation("list_namespaces", "tenant"),
        "TenancyService.namespace": Operation("get_policies", "namespace"),
        "TenancyService.create_namespace": Operation("create_namespace", "namespace"),
        "TenancyService.delete_namespace": Operation("delete_namespace", "namespace"),
        "TenancyService.namespace_stats": Operation("namespace_stats", "namespace"),
        "TenancyService.set_properties": Operation("set_policies", "namespace"),
        "TenancyService.remove_property": Operation("set_policies", "namespace"),
        "TenancyService.grant": Operation("grant_permissions", "namespace"),
        "TenancyService.grant_topic": Operation("grant_permissions", TOPIC),
        "TenancyService.topic_permissions": Operation("get_permissions", TOPIC),
        "BrokerService.create_producer": Operation("produce", TOPIC),
        "BrokerService.subscribe": Operation("consume", TOPIC),
        "BrokerService.unsubscribe": Operation("consume", CONSUMER),
        "BrokerService.seek": Operation("consume", CONSUMER),
        "BrokerService.entry": Operation("consume", TOPIC),
        "BrokerService.last_message_id": Operation("consume", CONSUMER),
        "BrokerService.unfinished_message": Operation("consume", CONSUMER),
        "BrokerService.lookup": Operation("lookup", TOPIC),
        "BrokerService.partitions": Operation("lookup", TOPIC),
        "BrokerService.partitions_to_use": Operation("produce or consume", TOPIC),
        "BrokerService.watch_partitions": Operation("lookup", TOPIC),
        "BrokerService.list_topics": Operation("list_topics", "namespace"),
        "BrokerService.watch_topics": Operation("list_topics", "namespace"),
        "BrokerService.topic_stats": Operation("topic_stats", TOPIC),
        "BrokerService.compact_topic": Operation("compact_topic", TOPIC),
        "BrokerService.create_topic": Operation("create_topic", TOPIC),
        "BrokerService.update_partitions": Operation("create_topic", TOPIC),
        "BrokerService.terminate_topic": Operation("terminate_topic", TOPIC),
        "BrokerService.delete_topic": Operation("delete_topic", TOPIC),
        "BrokerService.delete_subscription": Operation("delete_subscription", TOPIC),
        "BrokerService.topic_policies": Operation("get_policies", TOPIC),
        "BrokerService.change_topic_policies": Operation("set_policies", TOPIC),
        "BrokerService.namespace_policies": Operation("get_policies", "namespace"),
        "BrokerService.change_namespace_policies": Operation("set_policies", "namespace"),
        "BrokerService.create_subscription": Operation("create_subscription", TOPIC),
        "BrokerService.seek_subscription": Operation("seek_subscription", TOPIC),
        "BrokerService.skip_messages": Operation("skip_messages", TOPIC),
        "BrokerService.clear_backlog": Operation("skip_messages", TOPIC),
        "BrokerService.expire_messages": Operation("expire_messages", TOPIC),
        "BrokerService.peek_messages": Operation("peek_messages", TOPIC),
        "BrokerService.list_brokers": Operation("list_brokers", "cluster"),
        "BrokerService.list_bookies": Operation("list_bookies", "cluster"),
        "BrokerService.broker_figures": Operation("list_brokers", "cluster"),
        "BrokerService.loaded_topics": Operation("list_busiest", "cluster"),
        "BrokerService.diagnose": Operation("diagnose", "cluster"),
        "BrokerService.list_busiest": Operation("list_busiest", "cluster"),
        "BrokerService.list_bundles": Operation("list_bundles", "namespace"),
        "BrokerService.unload_bundle": Operation("unload_bundle", "cluster"),
        "BrokerService.split_bundle": Operation("split_bundle", "cluster"),
        "BrokerService.drain": Operation("drain", "cluster"),
        "BrokerService.drains": Operation("list_brokers", "cluster"),
        "SchemaService.add_schema": Operation("produce", TOPIC),
        "SchemaService.set_schema": Operation("set_schema", TOPIC),
        "SchemaService.delete_schemas": Operation("set_schema", TOPIC),
        "SchemaService.get_schema": Operation("produce or consume or get_schema", TOPIC),
        "SchemaService.get_schemas": Operation("get_schema", TOPIC),
        "SchemaService.find_schema": Operation("get_schema", TOPIC),
        "SchemaService.test_schema": Operation("get_schema", TOPIC),
        **dict.fromkeys(
            (f"StoredService.{name}" for name in ("ledgers", "ledger", "repairs", "damage")),
            Operation("list_ledgers", "cluster"),
        ),
    }


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
async def test_the_fields_of_a_request_are_the_arguments_of_its_operation(kind: Any) -> None:
    values = {str: "orders", int: 1, bool: False, tuple[str, Any]: ("earliest", None)}
    types = get_type_hints(kind)
    command = kind(0, *[values[types[name]] for name in kind.__struct_fields__[1:]])
    async with running_broker() as broker:
        with contextlib.suppress(MagnetarError):
            to_wire(await REQUESTS[kind](BrokerService(broker), Everyone(), command, b"\x90"))


def test_every_operation_is_in_the_table() -> None:
    assert set(
        public_operations(
            BrokerService, LedgerService, AdminService, TenancyService, StoredService, SchemaService
        )
    ) == set(OPERATIONS)


def test_an_operation_without_a_row_is_noticed() -> None:
    class Careless(BrokerService):
        async def wipe(self, topic: str) -> None:
            """Not decorated."""

    assert set(public_operations(Careless)) - {name.replace("Broker", "Careless") for name in OPERATIONS} >= {
        "Careless.wipe"
    }


@pytest.mark.parametrize("name", sorted(OPERATIONS))
async def test_an_operation_that_is_refused_does_nothing(name: str) -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with running_broker(ledgers, metadata) as broker:
        service, nobody = BrokerService(broker), Nobody()
        opened = await service.subscribe(
            Everyone(),
            "orders",
            SubscribeRequest("billing", start=("earliest", None)),
            port=_port(broker),
        )
        before = await _everything(metadata), ledgers.next_ledger_id, sorted(broker.topics)
        owners = {
            "BrokerService": service,
            "LedgerService": service.ledgers,
            "AdminService": service.admin,
            "TenancyService": service.tenancy,
            "StoredService": service.stored,
            "SchemaService": service.schemas,
        }
        owner: Any = owners[name.partition(".")[0]]
        method = getattr(owner, name.split(".")[1])
        parameters = list(inspect.signature(method).parameters.values())[1:]
        resource = OPERATIONS[name].resource
        first: Any = opened if resource == CONSUMER else "other" if resource == TOPIC else "public/default"
        # It must refuse before it looks at any of them.
        positional = [object() for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        named = {one.name: object() for one in parameters if one.kind is one.KEYWORD_ONLY}
        if resource == "cluster":
            positional, first = positional[1:], object()
        none = name in ("BrokerService.list_brokers", "TenancyService.clusters", "TenancyService.tenants")
        arguments = [] if none else [first, *positional]
        with pytest.raises(NotAuthorized):
            await method(nobody, *arguments, **named)
        full_name = {
            CONSUMER: "persistent://public/default/orders",
            TOPIC: "persistent://public/default/other",
            "cluster": "",
        }
        permissions = OPERATIONS[name].permission.split(" or ")
        assert nobody.asked == [(one, full_name.get(resource, "public/default")) for one in permissions]
        assert (await _everything(metadata), ledgers.next_ledger_id, sorted(broker.topics)) == before
        assert opened.subscription.consumers == [opened.consumer]


def _port(broker: Any) -> Any:
    from magnetar.broker.listeners.native.ports import ConsumerPort

    return ConsumerPort(FakeClient(broker), 1, lambda *_: None)


async def _everything(metadata: MemoryMetadataStore, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in await metadata.children(path or "/"):
        child = f"{path}/{name}"
        found[child] = await metadata.get(child)
        found |= await _everything(metadata, child)
    return found


async def test_topics_are_listed_in_pages() -> None:
    async with running_broker() as broker:
        service = BrokerService(broker)
        names = sorted(f"persistent://public/default/t{number}" for number in range(25))
        for name in names:
            await service.create_topic(Everyone(), name)
        pages, after, more = [], "", True
        while more:
            page = await service.list_topics(Everyone(), "public/default", after=after, count=10)
            pages.append(page.topics)
            after, more = page.topics[-1], page.more
        assert [len(page) for page in pages] == [10, 10, 5]
        assert [name for page in pages for name in page] == names
        assert (await service.list_topics(Everyone(), "", count=MAX_TOPICS_PER_PAGE + 1)).topics == names
        assert (await service.list_topics(Everyone(), "", after=names[-1])).topics == []
        with pytest.raises(InvalidArgument):
            await service.list_topics(Everyone(), "", count=-1)


async def test_a_page_of_topics_reads_no_more_names_than_it_has() -> None:
    class Counting(MemoryMetadataStore):
        names = 0

        async def children(self, path: str, *, after: str = "", limit: int = 0) -> list[str]:
            found = await super().children(path, after=after, limit=limit)
            self.names += len(found)
            return found

    metadata = Counting()
    async with running_broker(metadata=metadata) as broker:
        service = BrokerService(broker)
        names = [
            f"persistent://{tenant}/{namespace}/t{number:02}"
            for tenant in ("a", "a-b", "c")
            for namespace in ("x", "y")
            for number in range(30)
        ]
        for name in names:
            await service.create_topic(Everyone(), name)
        found, after, more = [], "", True
        while more:
            metadata.names = 0
            page = await service.list_topics(Everyone(), "", after=after, count=7)
            assert metadata.names < 7 + 10, "and some tenants, namespaces and domains"
            found += page.topics
            after, more = page.topics[-1], page.more
        assert found == names
        page = await service.list_topics(Everyone(), "a/y", after=names[40], count=7)
        assert (page.topics, page.more) == (names[41:48], True)
