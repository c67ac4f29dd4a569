"""The program of docs/deduplication.md, killed again and again while it sends a file: each line is stored once, in order."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from magnetar.client.blocking import Client, connect
from support.service import Service

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

PAGE = Path(__file__).parents[2] / "docs" / "deduplication.md"
LINES = 60_000


def program(url: str) -> str:
    [text] = [
        block.partition("```")[0]
        for block in PAGE.read_text().split("```python\n")[1:]
        if "sender-of-numbers" in block
    ]
    return text.replace("magnetar://127.0.0.1:7650", url)


def run(client: Client, folder: Path, most: int) -> tuple[int, str]:
    """Runs the program, and kills it once so many messages are stored. Its return code, and what it printed."""
    line = [sys.executable, "sender.py"]
    with subprocess.Popen(line, cwd=folder, stdout=subprocess.PIPE, text=True) as sender:
        while sender.poll() is None and client.admin.topic_stats("lines")["next_index"] < most:
            time.sleep(0.001)
        sender.kill()  # nothing to one that has ended
        said, _ = sender.communicate(timeout=60)
    return sender.returncode, said


def test_a_program_that_is_killed_and_started_again_stores_each_line_once(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("".join(f"{number}\n" for number in range(LINES)))
    service = Service(tmp_path / "data")
    service.start()
    try:
        with connect(service.url) as client:
            client.admin.create_topic("lines")
            client.admin.update_topic_policies("lines", {"deduplication": True})
            (tmp_path / "sender.py").write_text(program(service.url))
            killed = [run(client, tmp_path, most)[0] for most in (1, 15_000, 30_000, 45_000)]
            assert killed.count(-signal.SIGKILL) >= 3, "the program was too fast to be killed"
            code, said = run(client, tmp_path, LINES + 1)
            assert code == 0
            begin = int(said.split()[3])
            assert begin > 0
            assert said == f"stored from line {begin} to {LINES - 1}\n"
            with client.create_reader("lines", start="earliest") as reader:
                values: list[bytes | None] = []
                while len(values) < LINES:
                    values += [message.value for message in reader.receive_batch(timeout=30)]
            assert values == [b"%d\n" % number for number in range(LINES)]
            assert client.admin.topic_stats("lines")["next_index"] == LINES
    finally:
        service.stop()
