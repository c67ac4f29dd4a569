"""What every test shares: the event loop it runs on, and the seeds of the simulated ones.

Async tests run on uvloop, as the daemons do; a test that must hold on the plain loop as well says
`@pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])` and then runs once on each.

A test that takes an argument `sim_seed` runs once per seed: `--sim-seeds N` gives the seeds 0..N-1,
`--sim-seed S` replays the one that failed. The seed is part of the test's name, so the line that pytest
prints for a failure is also the command that replays it.
"""

import asyncio
from collections.abc import Callable, Mapping

import pytest

DEFAULT_SIM_SEEDS = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose simulation seeds."""
    group = parser.getgroup("magnetar")
    group.addoption(
        "--sim-seeds", type=int, default=DEFAULT_SIM_SEEDS, help="run simulations with seeds 0..N-1"
    )
    group.addoption("--sim-seed", type=int, default=None, help="run simulations with this one seed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `sim_seed` once per chosen seed."""
    if "sim_seed" not in metafunc.fixturenames:
        return
    one: int | None = metafunc.config.getoption("--sim-seed")
    seeds = [one] if one is not None else list(range(metafunc.config.getoption("--sim-seeds")))
    metafunc.parametrize("sim_seed", seeds, ids=[f"seed{seed}" for seed in seeds])


LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Offer the loops that a test may run on; without a marker pytest-asyncio would run it on every one."""
    plain: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    try:
        import uvloop
    except ImportError:  # Windows: the client is tested on the plain loop
        return plain
    fast: dict[str, LoopFactory] = {"uvloop": uvloop.new_event_loop}
    marker = item.get_closest_marker("asyncio")
    asked = marker is not None and "loop_factories" in marker.kwargs
    return fast | plain if asked else fast
