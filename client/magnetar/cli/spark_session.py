"""Spark below a command: started quietly, ended for certain.

Spark, its JVM and its Python workers write to a log file of the command, never to the terminal; the file goes when the
command ends, unless Spark failed with something that only the log explains. The JVM is a session of its own, so Ctrl-C
reaches the command alone, which cancels what runs and stops Spark; a Spark that does not stop in time is killed. When the
command itself is killed, the JVM reads the end of its standard input and ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from .session import fail

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REQUIRED: Final = ("pyspark", "pyarrow")
JAVA: Final = 17
STOP_S: Final = 5.0
KILL_S: Final = 3.0
_JAVA_CURE: Final = (
    f"install Java {JAVA} or newer (apt install openjdk-{JAVA}-jre-headless), or set JAVA_HOME to one"
)


def require_spark() -> None:
    """Ends the command with one line when the `spark` extra is not installed."""
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        fail(
            "jobs of the data pipeline need Spark: pip install 'magnetar[spark]'  "
            f"(missing: {', '.join(missing)})"
        )


def require_java() -> None:
    """Ends the command with one line when there is no Java that Spark runs on. About 0.1 s."""
    home = os.environ.get("JAVA_HOME", "")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        fail(f"Spark needs Java, and there is none at {java or 'the PATH'}: {_JAVA_CURE}")
    try:
        version = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        fail(f"{java} does not run ({first_line(error)}): {_JAVA_CURE}")
    found = re.search(r'version "(?:1\.)?(\d+)', version.stderr)
    if found is not None and int(found[1]) < JAVA:
        fail(f"{java} is Java {found[1]}, which Spark does not run on: {_JAVA_CURE}")


def first_line(error: object) -> str:
    """Of what it says that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def of_java(error: object) -> str:
    """The line of an error of Spark that says what is wrong: of a Python traceback in it the last line, else the first."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    _, traceback, within = text.partition("Traceback (most recent call last):\n")
    if traceback:
        ends = [line for line in within.splitlines() if line and not line[0].isspace()]
        return ends[0] if ends else lines[0]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        return lines[1].removeprefix(": ")
    return first_line(error)


class SparkLog:
    """The file that Spark writes to. `keep` it when it has to explain something; else it goes with `close`."""

    def __init__(self) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="magnetar-spark-", suffix=".log")
        self.file = os.fdopen(descriptor, "wb", buffering=0)
        self._kept = False
        self._handler = logging.FileHandler(self.path)
        # Also what py4j and pyspark say in this process: nothing of it helps on a terminal.
        logging.getLogger().addHandler(self._handler)

    def keep(self) -> str:
        """For the end of an error message."""
        self._kept = True
        return f"(Spark's log: {self.path})"

    def reason(self) -> str:
        """Why a JVM did not start: its first line that tells of an error."""
        lines = Path(self.path).read_text(errors="replace").splitlines()
        telling = [
            line.strip() for line in lines if re.search(r"error|exception|unrecognized|invalid", line, re.I)
        ]
        return next(iter(telling or [line.strip() for line in lines if line.strip()]), "it says nothing")

    def close(self) -> None:
        """Ends it; may be called twice."""
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()
        self.file.close()
        if not self._kept:
            Path(self.path).unlink(missing_ok=True)


@contextlib.contextmanager
def spark_session(
    master: str, settings: Mapping[str, str], log: SparkLog, signals: Interrupts
) -> Iterator[SparkSession]:
    """A session that ends with the body, whatever becomes of that. A start that fails ends the command."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    conf = SparkConf(loadDefaults=False).setMaster(master).setAppName("magnetar")
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    if master.startswith("local"):
        # All in one process: neither the machine's name nor a firewall should matter.
        quiet |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    for name, value in (quiet | dict(settings)).items():
        conf.set(name, value)
    launch: Any = launch_gateway
    gateway: Any = None
    try:
        with signals.deferred():
            gateway = launch(conf, {"stdout": log.file, "stderr": log.file, "start_new_session": True})
        with signals.deferred():
            context = SparkContext(gateway=gateway, conf=conf)
            session = SparkSession(context)
            signals.raising()
        yield session
    except Exception as error:
        if gateway is None:  # what the JVM had to say
            fail(f"Spark does not start: {log.reason()} {log.keep()}")
        if SparkContext._active_spark_context is None:
            fail(f"Spark does not start: {of_java(error)} {log.keep()}")
        raise
    finally:
        signals.ignored()
        if gateway is not None:
            _stop(gateway)


def _stop(gateway: Any) -> None:
    """Within STOP_S + KILL_S seconds. On a thread: the connection of one that was interrupted is out of step."""
    from pyspark import SparkContext

    def stop() -> None:
        with contextlib.suppress(Exception):
            context = SparkContext._active_spark_context
            if context is not None:
                context.cancelAllJobs()
                context.stop()
            gateway.shutdown()

    stopping = threading.Thread(target=stop, name="stop Spark", daemon=True)
    stopping.start()
    stopping.join(STOP_S)
    process = gateway.proc
    if process is None:  # a JVM that was started elsewhere (PYSPARK_GATEWAY_PORT)
        return
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Interrupts:
    """What SIGINT and SIGTERM do at the moment; both end the command."""

    def __init__(self) -> None:
        self._told: int | None = None
        self._deferred = False
        self._ignored = False

    def __call__(self, number: int, _frame: FrameType | None = None) -> None:
        if self._ignored:
            return
        if self._deferred:
            self._told = number
        else:
            self._raise(number)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Interrupts wait for the end of the body: in the middle of a start it is not known yet what has to be stopped."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self._told is not None:
            self._raise(self._told)

    def raising(self) -> None:
        """Spark has put a handler of its own in the place."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self)

    def ignored(self) -> None:
        """Stopping is under way, and takes a bounded time."""
        self._ignored = True

    @staticmethod
    def _raise(number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


@contextlib.contextmanager
def interrupts() -> Iterator[Interrupts]:
    """SIGINT becomes KeyboardInterrupt and SIGTERM SystemExit(143) in the body, wherever that is interruptible."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    interrupts = Interrupts()
    interrupts.raising()
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = [
    "SparkLog",
    "first_line",
    "of_java",
    "require_java",
    "require_spark",
    "spark_session",
]
