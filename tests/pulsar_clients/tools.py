"""Runs scenarios with `pulsar-client`, `pulsar-perf` and `pulsar-shell`, and prints a line of JSON for each.

It prints as `runner` does.

Arguments: Pulsar's distribution, the URL of the service, that of its administration, what tells this run from others, and
names of scenarios (none: all). Each command is a Java virtual machine, which takes three seconds; a few run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

_AT_ONCE = 2
_LIMIT_S = 60.0  # of one command
_LONGEST = 300  # of a message that stands in a trace
_FAST = ("-r", "1000000")  # messages a second; it takes no 0
_EARLIEST = ("-p", "Earliest")


class Tools:
    """One scenario: topics of its own, commands, and what they printed."""

    def __init__(
        self, name: str, pulsar: Path, url: str, http: str, run: str, slots: asyncio.Semaphore
    ) -> None:
        self._pulsar = pulsar
        self._url = url
        self.http = http
        self._unique = f"{name}-{run}"
        self._slots = slots

    def topic(self, name: str = "t") -> str:
        return f"persistent://public/default/{self._unique}-{name}"

    async def client(self, *arguments: str) -> Any:
        """Of pulsar-client: the messages that came, and what it counted."""
        return self._seen(await self._run("pulsar-client", "--url", self._url, *arguments))

    async def perf(self, what: str, count: int, *arguments: str) -> bool:
        """Whether pulsar-perf sent or received so many messages; it sends a few more."""
        flag = "-n" if what == "read" else "-m"
        text = await self._run("pulsar-perf", what, "-u", self._url, flag, str(count), *arguments)
        counted = re.findall(r"(\d+) records (?:sent|received)", text)
        return bool(counted) and int(counted[-1]) >= count

    async def shell(self, *lines: str) -> Any:
        """What pulsar-shell printed of each command."""
        with tempfile.TemporaryDirectory() as folder:
            config, script = Path(folder, "client.conf"), Path(folder, "commands")
            config.write_text(f"webServiceUrl={self.http}\nbrokerServiceUrl={self._url}\n")
            script.write_text("\n".join(lines) + "\n")
            text = await self._run("pulsar-shell", "-c", str(config), "-f", str(script), "-np")
        parts = re.split(r"^\[\d+/\d+\] Executing .*$", text, flags=re.MULTILINE)
        return [self._seen(part) for part in parts[1:]]

    async def _run(self, name: str, *arguments: str) -> str:
        async with self._slots:
            with tempfile.TemporaryDirectory() as home:
                process = await asyncio.create_subprocess_exec(
                    self._pulsar / "bin" / name, *arguments,
                    env={**os.environ, "PULSAR_EXTRA_OPTS": f"-Duser.home={home}", "PULSAR_MEM": "-Xmx256m"},
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                )  # fmt: skip
                try:
                    output, _ = await asyncio.wait_for(process.communicate(), _LIMIT_S)
                except TimeoutError:
                    raise RuntimeError(f"{name} {arguments[0]} does not end") from None
                finally:
                    if process.returncode is None:
                        with contextlib.suppress(ProcessLookupError):
                            process.kill()
                        await process.wait()
        return output.decode(errors="backslashreplace")

    def _seen(self, text: str) -> dict[str, Any]:
        messages = re.findall(r"^publishTime:\[\d+\], (.*)$", text, re.MULTILINE)
        return {
            "messages": [one.replace(f"{self._unique}-", "")[:_LONGEST] for one in messages],
            "counted": re.findall(r"\d+ messages successfully \w+", text),
        }


async def produced_and_consumed(t: Tools) -> Any:
    topic = t.topic()
    sent = await t.client("produce", topic, "-m", "a,b", "-k", "k", "-p", "x=1", "-n", "2")
    return [sent, await t.client("consume", topic, "-s", "s", "-n", "4", "-t", "Shared", *_EARLIEST)]


async def consumed_as_it_comes(t: Tools) -> Any:
    """A consumer waits where a producer comes later."""
    topic = t.topic()
    await t.client("produce", topic, "-m", "before")
    waiting = asyncio.create_task(
        t.client("consume", topic, "-s", "s", "-n", "2", "-t", "Failover", *_EARLIEST)
    )
    await t.client("produce", topic, "-m", "later", "-db")
    return await waiting


async def consumed_by_a_pattern(t: Tools) -> Any:
    found = await t.shell(
        f"client produce {t.topic('in-one')} -m a",
        f"client produce {t.topic('in-two')} -m b",
        f"client consume {t.topic('in-')}.* --regex -s s -n 2 -p Earliest",
    )
    found[-1]["messages"].sort()
    return found


async def a_file_in_chunks(t: Tools) -> Any:
    topic = t.topic()
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("x" * 12_000_000)
        file.flush()
        sent = await t.client("produce", topic, "-c", "-db", "-f", file.name)
    return [sent, await t.client("consume", topic, "-s", "s", "-n", "1", *_EARLIEST)]


async def typed_messages(t: Tools) -> Any:
    text, pair = t.topic("text"), t.topic("pair")
    return await t.shell(
        f"client produce {text} -vs string -m a",
        f"client consume {text} -s s -n 1 -st auto_consume -p Earliest",
        f"client produce {pair} -kvk k -kvet separated -ks string -vs string -m a",
        f"client consume {pair} -s s -n 1 -st auto_consume -p Earliest",
    )


async def encrypted(t: Tools) -> Any:
    topic = t.topic()
    with tempfile.TemporaryDirectory() as folder:
        private, public = f"{folder}/private.pem", f"{folder}/public.pem"
        for command in (
            ["openssl", "genrsa", "-traditional", "-out", private, "2048"],
            ["openssl", "rsa", "-in", private, "-pubout", "-outform", "pem", "-out", public],
        ):
            subprocess.run(command, check=True, capture_output=True)
        return await t.shell(
            f"client produce {topic} -ekn client -ekv file://{public} -m secret -n 2",
            f"client consume {topic} -ekv file://{private} -s s -n 2 -p Earliest",
            f"client consume {topic} -ca CONSUME -s t -n 1 -p Earliest --hide-content",
        )


FROM_THE_EARLIEST = ("-sp", "Earliest", "-ss", "s")


async def measured(t: Tools) -> Any:
    topic = t.topic()
    sent = await t.perf("produce", 5000, *_FAST, "-s", "100", topic)
    return [sent, await t.perf("consume", 5000, *FROM_THE_EARLIEST, topic), await t.perf("read", 5000, topic)]


async def measured_with_a_tail(t: Tools) -> Any:
    topic = t.topic()
    consuming = asyncio.create_task(
        t.perf("consume", 2000, *FROM_THE_EARLIEST, "-st", "Shared", "-n", "2", topic)
    )
    sent = await t.perf("produce", 2000, *_FAST, "-db", "-n", "2", topic)
    return [sent, await consuming]


async def measured_by_key_over_partitions(t: Tools) -> Any:
    topic = t.topic()
    sent = await t.perf("produce", 3000, *_FAST, "-mk", "autoIncrement", "-np", "3", "-au", t.http, topic)
    keys = ("-st", "Key_Shared", "-n", "2", "--batch-index-ack")
    return [sent, await t.perf("consume", 3000, *FROM_THE_EARLIEST, *keys, topic)]


async def measured_in_compressed_chunks(t: Tools) -> Any:
    topic = t.topic()
    sent = await t.perf("produce", 3, "-r", "10", "-s", "7000000", "-ch", "-db", "-z", "ZSTD", topic)
    return [sent, await t.perf("consume", 3, *FROM_THE_EARLIEST, topic)]


async def measured_with_delays(t: Tools) -> Any:
    topic = t.topic()
    sent = await t.perf("produce", 200, "-r", "1000", "-d", "2", topic)
    return [sent, await t.perf("consume", 200, *FROM_THE_EARLIEST, "-st", "Shared", topic)]


async def typed_into_the_shell(t: Tools) -> Any:
    topic = t.topic()
    return await t.shell(
        f"client produce {topic} -m a,b -k k",
        f"client consume {topic} -s s -n 2 -p Earliest",
        f"client read {topic} -m earliest -n 2",
        f"client consume {topic} -s other -n 2 -p Earliest -t Key_Shared",
    )


SCENARIOS: dict[str, Callable[[Tools], Awaitable[Any]]] = {
    one.__name__: one
    for one in (
        produced_and_consumed, consumed_as_it_comes, consumed_by_a_pattern, a_file_in_chunks,
        typed_messages, encrypted, measured, measured_with_a_tail, measured_by_key_over_partitions,
        measured_in_compressed_chunks, measured_with_delays, typed_into_the_shell,
    )
}  # fmt: skip


async def main(pulsar: str, url: str, http: str, run: str, *names: str) -> None:
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(name: str) -> None:
        try:
            row = {"seen": await SCENARIOS[name](Tools(name, Path(pulsar), url, http, run, slots))}
        except Exception as error:
            row = {"failed": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps({"scenario": name, **row}) + "\n")
        sys.stdout.flush()

    async with asyncio.TaskGroup() as group:
        for name in names or SCENARIOS:
            group.create_task(one(name))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
