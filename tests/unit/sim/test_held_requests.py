"""What the checker of a cluster's brokers says of a request that is held, by a broker that may stand still meanwhile."""

import asyncio

import pytest

from sim.cluster.metadata import ClusterMetadata
from sim.cluster.receipts import no_longer
from sim.deliveries import Violation
from support.sim import SimLoop
from support.sim.loop import SimulationFailed

BOUND_S = 8.0


def held(answered_after_s: float, *pauses: tuple[float, float], seconds: float = 60.0) -> float | None:
    """When the checker speaks up: seconds after the request. `answered_after_s`: of time; pauses: when, for how long."""
    loop = SimLoop(1)
    process = loop.start_process("k0")
    requests = {1}
    spoke: list[float] = []

    async def main() -> None:
        metadata = ClusterMetadata(loop)
        began = loop.now
        loop.call_outside(answered_after_s, requests.discard, 1)
        for at, length in pauses:
            loop.call_outside(at, process.pause, length)
        no_longer(metadata, process, BOUND_S, lambda: 1 in requests, "k0 has held a request")
        while loop.now < began + seconds:
            await asyncio.sleep(0.05)
            spoke[:] = [loop.now - began]

    try:
        loop.run(main())
    except (Violation, SimulationFailed) as error:
        if "k0 has held a request" not in str(error):
            raise
        return spoke[0]
    finally:
        loop.close()
    return None


def test_a_request_that_is_never_answered_is_noticed_at_the_bound() -> None:
    assert held(1e9) == pytest.approx(BOUND_S, abs=0.1)


def test_one_that_is_answered_only_after_30_s_is_noticed_as_well() -> None:
    assert held(30.0) == pytest.approx(BOUND_S, abs=0.1)


def test_one_that_is_answered_before_the_bound_is_none_of_its_business() -> None:
    assert held(BOUND_S - 0.1) is None


def test_the_time_for_which_the_broker_stood_still_does_not_count_pauses_that_overlap_once() -> None:
    pauses = (2.0, 3.0), (4.0, 2.0), (5.5, 4.0), (20.0, 1.0)  # 2.0 to 9.5, and 20.0 to 21.0
    assert held(7.5 + BOUND_S - 0.1, *pauses) is None
    assert held(1e9, *pauses) == pytest.approx(7.5 + BOUND_S, abs=0.2)
    assert held(30.0, *pauses) == pytest.approx(7.5 + BOUND_S, abs=0.2)


def test_a_broker_that_stands_still_at_the_bound_is_looked_at_when_it_goes_on() -> None:
    assert held(1e9, (BOUND_S - 0.5, 10.0)) == pytest.approx(BOUND_S + 10.0, abs=0.2)
