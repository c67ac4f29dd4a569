"""What every test shares: the event loop it runs on, and the seeds of the simulated ones.

Async tests run on uvloop, as the daemons do; a test that must hold on the plain loop as well says
`@pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])` and then runs once on each. Those in the
folders VIRTUAL run, with their fixtures, on the loop of the simulation: in virtual time, over simulated sockets, so that a
busy machine fails none.
Where one needs real sockets, threads or processes it says `loop_factories=["uvloop"]`.

A test that takes an argument `sim_seed` runs once per seed: `--sim-seeds N` gives the seeds 0..N-1,
`--sim-seed S` replays the one that failed. The seed is part of the test's name, so the line that pytest
prints for a failure is also the command that replays it.

A test may take 150 s (`timeout` in pyproject.toml, or its own `@pytest.mark.timeout(N)`). pytest-timeout's
alarm signal fails the one test and goes on, but under an idle uvloop it hangs for good: the exception from the
signal handler never leaves the loop. So an async test is cancelled from inside its loop at its limit. If a test
will not end, async or not, its process ends with every stack printed, about BACKSTOP_S later: the whole run, or under
pytest-xdist (`-n`) one worker, which counts as a failure of that test and is replaced.

A test of processes carries the marker `real` (support.real_tests); with `--second-try` one or two of them that failed run
once more, alone (support.second_try). All others decide the same each time: Hypothesis tries the same examples in every run,
and others only in the long form (support.long_form).

A test of Spark that carries the marker `spark` is left out unless SPARK or LONG is set (support.long_form).

What runs in one worker is decided in support.workers.
"""

import asyncio
import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from support.forked_commands import spawn
from support.long_form import LONG
from support.real_tests import RealTests
from support.second_try import SecondTry
from support.sim import SimLoop
from support.workers import starts_early

DEFAULT_SIM_SEEDS = 10
BACKSTOP_S = 15
BACKSTOP_EVERY_S = 2.0
LONG_S = 30
VIRTUAL = (
    "tests/unit/bookie/",
    "tests/unit/broker/",
    "tests/unit/client/",
    "tests/unit/ledger/",
    "tests/unit/metadata/",
)
LIMIT_S = pytest.StashKey[float]()
BACKSTOP = pytest.StashKey["Backstop"]()

# An example takes what the neighbours of its worker leave; how long says nothing about what is tested.
settings.register_profile(
    "shared cores",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not LONG,
)
settings.load_profile("shared cores")
if not LONG:
    # Hypothesis also draws the constants of every module of the project that is loaded. What it tries would depend on the
    # tests that run beside this one, and on a number that somebody changes elsewhere.
    providers._get_local_constants = lambda: providers._local_constants
os.environ["MAGNETAR_CONTEXTS"] = os.path.join(os.sep, "nonexistent", "contexts.json")  # not the developer's


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose simulation seeds."""
    group = parser.getgroup("magnetar")
    group.addoption(
        "--sim-seeds", type=int, default=DEFAULT_SIM_SEEDS, help="run simulations with seeds 0..N-1"
    )
    group.addoption("--sim-seed", type=int, default=None, help="run simulations with this one seed")
    group.addoption(
        "--second-try", action="store_true", help="run one or two `real` tests that failed once more, alone"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins of tests/support; ignore what PySpark before 4.2 leaves open.

    It says so, of the sockets of its driver, in the test that comes after.
    """
    config.pluginmanager.register(RealTests())
    with contextlib.suppress(
        ModuleNotFoundError
    ):  # it is not there where tests of this file play with a copy of it
        importlib.import_module("bench.service_process").ServiceProcess.spawn = staticmethod(spawn)
    if config.getoption("--second-try") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondTry(config))
    found = importlib.util.find_spec("pyspark")
    if found is not None and tuple(map(int, version("pyspark").split(".")[:2])) < (4, 2):
        config.addinivalue_line("filterwarnings", "ignore:unclosed <socket:ResourceWarning")
        config.addinivalue_line(
            "filterwarnings", "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `sim_seed` once per chosen seed."""
    if "sim_seed" not in metafunc.fixturenames:
        return
    one: int | None = metafunc.config.getoption("--sim-seed")
    seeds = [one] if one is not None else list(range(metafunc.config.getoption("--sim-seeds")))
    metafunc.parametrize("sim_seed", seeds, ids=[f"seed{seed}" for seed in seeds])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """Keep the standard error that pytest captures, for the backstop; workers, which start here, inherit it."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        session.config.stash[BACKSTOP] = Backstop(os.dup(2))
        return (yield)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later search for garbage, and search less often.

    Such searches were a seventh of the CPU of a run. A test that needs one calls `gc.collect()`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name every test that took longer than LONG_S, with its own fixtures, and every seed that is to be written anew."""
    took: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took[report.nodeid] += report.duration  # type: ignore[assignment]
                if report.when == "call" and (pin := dict(report.user_properties).get("pin")):
                    terminalreporter.write_line(f"noticed late, pin this seed: {pin}")
    for nodeid, seconds in took.most_common():
        if seconds > LONG_S:
            terminalreporter.write_line(f"longer than {LONG_S} s: {seconds:.0f} s {nodeid}")


class Backstop:
    """Ends the process, with every stack printed, when one test runs for far too long, even if that holds the GIL.

    The alarm of faulthandler is a thread of its own each time, and to end it takes up to 10 ms where all cores are busy: too
    much for each of thousands of tests. So a thread looks some times a minute, and sets it anew if another test runs than at
    its last look.
    """

    def __init__(self, standard_error: int) -> None:
        self._standard_error = standard_error
        self._running: tuple[pytest.Item | None, float] = (None, 0.0)  # and its limit in seconds
        self._watch: threading.Thread | None = None

    @contextlib.contextmanager
    def around(self, item: pytest.Item, limit_s: float) -> Iterator[None]:
        """This test, with its fixtures; without a limit it runs for as long as it likes."""
        if self._watch is None:
            self._watch = threading.Thread(target=self._look, name="backstop", daemon=True)
            self._watch.start()
        self._running = (item, limit_s)
        try:
            yield
        finally:
            self._running = (None, limit_s)

    def _look(self) -> None:
        seen: pytest.Item | None = None
        while True:
            item, limit_s = self._running
            if limit_s <= 0:
                faulthandler.cancel_dump_traceback_later()
            elif (
                item is None or item is not seen
            ):  # between two tests it is set, too: the next one may hold the GIL at once
                faulthandler.dump_traceback_later(limit_s + BACKSTOP_S, exit=True, file=self._standard_error)
            seen = item
            time.sleep(BACKSTOP_EVERY_S)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The backstop, see the module docstring; and signals mean what they did before, also for processes started later."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    limit_s = item.stash.get(LIMIT_S, 0.0)
    try:
        with item.config.stash[BACKSTOP].around(item, limit_s):
            return (yield)
    finally:
        for number, handler in handlers.items():
            if (
                handler is not None and signal.getsignal(number) is not handler
            ):  # a daemon that has ended ignores them
                signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: one worker more than there are cores, since many tests wait for a process of their own."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share something expensive run in one worker; see support.workers."""
    from support.workers import UnitScheduling

    config.option.loadscopereorder = False
    return UnitScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the long units first; bound every async test from inside its loop; see the module docstring."""
    if not (LONG or os.environ.get("SPARK")):
        left_out = [item for item in items if item.get_closest_marker("spark")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: not starts_early(item.nodeid))
    chosen = config.getoption("timeout", None)  # --timeout
    default = float(config.getini("timeout") if chosen is None else chosen)
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit_s = float(marker.args[0]) if marker is not None and marker.args else default
        if limit_s <= 0 or not isinstance(item, pytest.Function):
            continue
        fixtures_s = default if marker is not None and marker.kwargs.get("func_only") else 0.0
        item.stash[LIMIT_S] = limit_s + fixtures_s
        if inspect.iscoroutinefunction(item.obj):
            item.obj = _bounded(item.obj, limit_s)
            item.add_marker(pytest.mark.timeout(0), append=False)


def _bounded(
    test: Callable[..., Coroutine[Any, Any, None]], limit_s: float
) -> Callable[..., Coroutine[Any, Any, None]]:
    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        bound = asyncio.timeout(limit_s)
        try:
            async with bound:
                await test(*args, **kwargs)
        except TimeoutError:
            if bound.expired():
                pytest.fail(f"still running after {limit_s:g} s; cancelled at the line above")
            raise

    return run


LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Offer the loops that a test may run on; without a marker pytest-asyncio would run it on every one."""
    marker = item.get_closest_marker("asyncio")
    asked = marker is not None and "loop_factories" in marker.kwargs
    if not asked and item.nodeid.startswith(VIRTUAL) and item.get_closest_marker("real") is None:
        return {"virtual": functools.partial(SimLoop, seed=1)}
    plain: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    try:
        import uvloop
    except ImportError:  # Windows: the client is tested on the plain loop
        return plain
    fast: dict[str, LoopFactory] = {"uvloop": uvloop.new_event_loop}
    return fast | plain if asked else fast
