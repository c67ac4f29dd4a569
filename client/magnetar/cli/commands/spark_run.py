"""`magnetar spark JOB` at work: arguments checked, the job's program run, its result, one line when it fails.

Whatever can be known without Spark is checked before it starts, within a second: it takes ten times as long to start.
The job is a program (`magnetar.spark.program`) in a process group of its own, with Spark and its Java machine: Ctrl-C
reaches the command alone, which then ends the group, within KILL_S. Spark writes to a log file, which goes with the command
unless it has to explain an error. A command that is killed takes all along: the program reads the end of its standard input.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from magnetar.proto.errors import MagnetarError

from ..terminal.session import EXIT_FAILED, EXIT_INTERRUPTED, exit_code, fail, named_values, print_json
from ..terminal.tables import print_table, text

if TYPE_CHECKING:
    from magnetar.spark.program import Order, Say

REQUIRED: Final = ("pyspark", "pyarrow")
JAVA: Final = 17
KILL_S: Final = 8.0
_JAVA_CURE: Final = (
    f"install Java {JAVA} or newer (apt install openjdk-{JAVA}-jre-headless), or set JAVA_HOME to one"
)
# Arguments of the jobs' functions that errors name: as words of their own, some only behind "option", some only at the
# beginning.
_NAMED = re.compile(r"\boption (start|end|compression|topics?)\b|"
                    r"^(window|watermark|checkpoint|path|archive|with_backlog)\b|"
                    r"\b(?:option )?(service_url|to_topic|to_parquet|from_offset|before_offset)\b")  # fmt: skip


def run_job(
    job: str, url: str, options: Mapping[str, Any], *, master: str, conf: Sequence[str], as_json: bool
) -> None:
    """Runs a job and prints what came of it; every error ends the command with one line."""
    began = time.perf_counter()
    require_spark()
    from magnetar.spark import program

    settings = {"spark.master": master, **named_values("--conf", conf, "spark.executor.memory=4g")}
    with _ended_by_signals(), _status() as say:
        say("asking the service")
        with options_as_flags():
            program.check(job, url, options)
        require_java()
        report = run_program(
            program.Order(
                job=job, url=url, options={**options}, settings=settings, watched=sys.stderr.isatty()
            ),
            say,
        )
    _print(report, round(time.perf_counter() - began, 1), as_json=as_json)
    if report["failed"]:
        raise SystemExit(EXIT_FAILED)


def _print(report: Mapping[str, Any], seconds: float, *, as_json: bool) -> None:
    try:
        if as_json:
            print_json({**report["result"], "seconds": seconds})
            return
        print(report["title"])
        rows = [(name, text(value)) for name, value in {**report["figures"], "seconds": seconds}.items()]
        print_table("", ("", ""), rows, right=(1,))
        if report["table"] is not None:
            title, columns, rows, right = report["table"]
            print_table(title, columns, rows, right=right)
        print(*report["notes"], sep="\n", end="\n" if report["notes"] else "", flush=True)
    except BrokenPipeError:  # who reads the result has enough; Python would complain again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_FAILED) from None


def run_program(order: Order, say: Say) -> dict[str, Any]:
    """The report of the job's program, which has ended, and all below it. Raises SystemExit."""
    from magnetar.spark import program

    folder = Path(tempfile.mkdtemp(prefix="magnetar-spark-"))
    log = folder / "spark.log"
    keep = False
    last: dict[str, Any] = {}
    try:
        with log.open("wb") as log_file, _process(folder, log_file) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                own, mark, message = line.decode(errors="replace").partition(program.MARK)
                log_file.write(own.encode())
                if mark:
                    last = json.loads(message)
                    if "state" not in last:
                        break
                    say(last["state"])
        if "report" in last:
            found: dict[str, Any] = last["report"]
            return found
        keep = last.get("log", True)
        if "error" in last:
            reason = as_flags(last["error"])
        else:
            what = "Spark does not start" if last.get("state") == program.STARTING else "the job ended"
            reason = f"{what}: {_reason(log)}"
        fail(f"{reason} (Spark's log: {log})" if keep else reason)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _process(folder: Path, log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The program, and all of its process group, has ended KILL_S after the body; an error of the body ends it at once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "magnetar.spark.program"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
        env={"PYSPARK_PYTHON": sys.executable, **os.environ, "TMPDIR": str(folder)},
    )

    def end(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    killer = threading.Timer(KILL_S, end, (signal.SIGKILL,))
    assert process.stdout is not None
    try:
        with process:  # waits for it in the end
            try:
                yield process
            except BaseException:
                end(signal.SIGTERM)
                raise
            finally:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                killer.start()
                while process.stdout.read(1 << 16):  # until the Java machine has ended as well
                    pass
    finally:
        killer.cancel()


def _reason(log: Path) -> str:
    """Why no report came: the first line that tells of an error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = (line for line in lines if re.search(r"error|exception|unrecognized|invalid", line, re.I))
    return next(telling, next(iter(lines), "it says nothing"))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ctrl-C in the body ends the command with 130, SIGTERM with 143; what the body began is ended first."""

    def terminated(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what the command does, while a person watches."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, emoji=False).status("") as status:
        yield lambda state: status.update(Text(state))


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
        fail(f"{java} does not run ({error}): {_JAVA_CURE}")
    found = re.search(r'version "(?:1\.)?(\d+)', version.stderr)
    if found is not None and int(found[1]) < JAVA:
        fail(f"{java} is Java {found[1]}, which Spark does not run on: {_JAVA_CURE}")


@contextlib.contextmanager
def options_as_flags() -> Iterator[None]:
    """An error becomes one line that names the option of the command: 2 for a wrong one, 1 for the service."""
    try:
        yield
    except MagnetarError as error:
        fail(as_flags(error.message), exit_code(error))
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {error.strerror or error}")


def as_flags(message: str) -> str:
    """Arguments that it names as options of the command."""

    def flag(match: re.Match[str]) -> str:
        name = next(group for group in match.groups() if group)
        if name.startswith("topic"):
            return "TOPIC"
        return "--url" if name == "service_url" else f"--{name.replace('_', '-')}"

    return _NAMED.sub(flag, message)
