"""Apache Pulsar, as it is distributed: fetched by Maven once, its tools, and a standalone service of it to record from."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.service_process import free_port

VERSION = "4.0.6"
ARTIFACT = f"org.apache.pulsar:pulsar-server-distribution:{VERSION}:tar.gz:bin"
_START_LIMIT_S = 300.0
_MEMORY = "-Xms256m -Xmx1g -XX:MaxDirectMemorySize=1g"


class Missing(Exception):
    """What is needed and not there; the text says how it comes."""


def distribution(folder: Path) -> Path:
    """Pulsar's own folder below `folder`; the first time Maven downloads it, 245 MB."""
    folder = folder.resolve()
    found = folder / f"apache-pulsar-{VERSION}"
    if not shutil.which("java"):
        raise Missing("there is no `java` here; pulsar-admin needs Java 17 or newer")
    if not (found / "bin" / "pulsar-admin").exists():
        if not shutil.which("mvn"):
            raise Missing(f"there is no `mvn` here that downloads {ARTIFACT}; or unpack that in {folder}")
        copy = ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={ARTIFACT}", f"-DoutputDirectory={folder}"]
        if subprocess.run(copy, check=False).returncode:
            raise Missing(f"Maven did not find {ARTIFACT}; its message says why")
        archive, unpacked = next(folder.glob("*.tar.gz")), folder / "unpacked"
        shutil.unpack_archive(archive, unpacked)
        (unpacked / found.name).rename(found)  # whole, or not there
        archive.unlink()
    return found


@contextlib.contextmanager
def standalone(pulsar: Path, **settings: str) -> Iterator[tuple[str, str]]:
    """A Pulsar of one process with empty data, and without functions; its addresses for HTTP and for clients.

    `settings`: of standalone.conf, also such as do not stand there.
    """
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+") as log:
        http, native = free_port(), free_port()
        changed = {
            "webServicePort": http, "brokerServicePort": native, "advertisedAddress": "localhost",
            "allowAutoTopicCreationType": "non-partitioned", **settings,
        }  # fmt: skip
        text = (pulsar / "conf" / "standalone.conf").read_text()
        for name, value in changed.items():
            text = re.sub(rf"^{name}=.*$", "", text, flags=re.MULTILINE) + f"\n{name}={value}"
        config = Path(folder, "standalone.conf")
        config.write_text(text)
        process = subprocess.Popen(
            [pulsar / "bin" / "pulsar", "standalone", "-c", config, "-nfw", "-nss", "-a", "localhost",
             "--bookkeeper-dir", f"{folder}/bookkeeper", "--metadata-dir", f"{folder}/metadata"],
            cwd=folder, env={**os.environ, "PULSAR_MEM": _MEMORY}, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        url = f"http://localhost:{http}"
        try:
            _wait(process, f"{url}/admin/v2/brokers/health", Path(log.name))
            yield url, f"pulsar://localhost:{native}"
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=30):
            return
        time.sleep(1)
    raise Missing(f"Pulsar did not start: {log.read_text()[-2000:]}")
