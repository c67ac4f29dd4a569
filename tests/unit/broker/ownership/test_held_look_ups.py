"""For how long a broker holds a look-up that it cannot answer: two session timeouts, and what it is just doing then."""

import asyncio
from collections.abc import Sequence

import pytest

from magnetar.broker.ownership.cluster_view import KnownOwner
from magnetar.broker.ownership.core.bundles import Bundle
from magnetar.metadata.store import Operation
from magnetar.proto.errors import RequestTimeout, ServiceNotReady
from support.cluster_kit import brokers
from support.virtual_time import in_virtual_time
from unit.broker.ownership.test_ownership import TOPICS, locate


@in_virtual_time
async def test_look_ups_of_one_bundle_do_not_wait_for_each_other_when_the_bundle_cannot_be_taken() -> None:
    """Regression: only the one that had made an attempt itself looked at the time, so each waited for all before it."""
    async with brokers("a", default_bundles=1) as cluster:
        one = cluster.brokers["a"]

        async def fails(operations: Sequence[Operation]) -> None:
            await asyncio.sleep(0.5)
            raise RequestTimeout("the store does not answer")

        cluster.metadata.commit = fails  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def held() -> float:
            with pytest.raises(ServiceNotReady, match="cannot take bundle"):
                await locate(one, TOPICS[0], authoritative=True)
            return loop.time() - began

        longest = max(await asyncio.gather(*(held() for _ in range(20))))
        # Two session timeouts of 1 s, and the attempt that was under way then: 0.5 s, and the pause of 1 s behind it.
        assert longest <= 2.0 + 1.5 + 0.1


@in_virtual_time
async def test_a_look_up_is_not_held_for_as_long_as_the_owners_of_its_namespace_change() -> None:
    async with brokers("a", default_bundles=1) as cluster:
        one = cluster.brokers["a"]
        owners = one.ownership.view.owners("public/default")
        read = owners._read

        async def outdated() -> dict[Bundle, KnownOwner]:
            await asyncio.sleep(0.1)
            found = await read()
            owners.drop()
            return found

        owners._read = outdated
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(ServiceNotReady, match="change all the time"):
            await locate(one, TOPICS[0], authoritative=True)
        assert loop.time() - began <= 2.0 + 0.1 + 0.1
