"""Programs that use Spark, started as a person would: an environment of their own, a JVM of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# Imported by every Python that finds it on its path: as if nothing but the extra `spark` was installed.
BLOCKED = ("aiohttp", "aiozk", "pandas", "prometheus_client", "rich", "rocksdict", "structlog", "typer")
SITE_CUSTOMIZE = f"""
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by a test)", name=name)


sys.meta_path.insert(0, Blocked())
"""
# Programs that end soon: the JVM's second compiler costs them more CPU (a third of all) than it saves.
DEFAULTS = """
spark.driver.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
spark.executor.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
spark.ui.enabled false
spark.ui.showConsoleProgress false
spark.driver.host 127.0.0.1
spark.driver.bindAddress 127.0.0.1
spark.driver.memory 1g
spark.sql.shuffle.partitions 2
"""


def spark_environment(folder: Path, path: Sequence[Path], **more: str) -> dict[str, str]:
    """No variable of this process but the ones that say where Java is. `path`: before /usr/bin and /bin."""
    conf = folder / "conf"
    conf.mkdir(exist_ok=True)
    (conf / "spark-defaults.conf").write_text(DEFAULTS)
    passed_on = {name: os.environ[name] for name in ("JAVA_HOME", "LANG") if name in os.environ}
    java = [str(Path(found).parent)] if (found := shutil.which("java")) else []
    return {
        **passed_on,
        "HOME": str(folder),
        "PATH": os.pathsep.join([*map(str, path), "/usr/bin", "/bin", *java]),
        "SPARK_CONF_DIR": str(conf),
        "SPARK_LOCAL_IP": "127.0.0.1",
        **more,
    }


def only_the_spark_extra(folder: Path) -> Path:
    """A folder for PYTHONPATH, with which no server library can be imported."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    return folder


class Program:
    """Started at once, in a process group of its own, which ends with `result` whatever happens."""

    def __init__(
        self,
        command: Sequence[str | Path] | str,
        folder: Path,
        environment: Mapping[str, str],
        given: str = "",
    ) -> None:
        self._command = command
        self._log = folder / f"{id(self)}.log"
        self._given = folder / f"{id(self)}.in"
        self._given.write_text(given)
        with self._given.open() as given_to_it, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                shell=isinstance(command, str),
                cwd=folder,
                env=environment,
                stdin=given_to_it,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def result(self, timeout_s: float = 100) -> str:
        """What it said. It must end well."""
        code, text = self.ended(timeout_s)
        assert code == 0, f"{self._command} ended with {code}:\n{text[-6000:]}"
        return text

    def ended(self, timeout_s: float = 100) -> tuple[int | None, str]:
        """Exit code (None: it had to be killed) and what it said."""
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout_s)
        finally:
            self.kill()
        return code, self._log.read_text(errors="replace")

    def kill(self) -> None:
        """The program and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


__all__ = ["BLOCKED", "Program", "only_the_spark_extra", "spark_environment"]
