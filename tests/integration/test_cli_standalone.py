"""The command line against a real service: start and stop, pipes, JSON, one clear error for each thing that goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from magnetar.client.blocking import Message, connect
from support.forked_commands import run_magnetar
from support.service import Service, holding_port

pytestmark = [pytest.mark.integration, pytest.mark.real]

AT_ONCE = ("--set", "bookie.lock_timeout_s=0.2")  # it waits ten seconds for helpers of one that was killed
MAGNETAR = [sys.executable, "-m", "magnetar.cli.main"]


def magnetar(
    *arguments: str, stdin: str | bytes = b"", url: str = "", timeout: float = 40
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAGNETAR_")}
    if url:
        environment["MAGNETAR_URL"] = url
    data = stdin.encode() if isinstance(stdin, str) else stdin
    return run_magnetar(*arguments, stdin=data, environment=environment, timeout=timeout)


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for the tests that only talk to it."""
    started = Service(tmp_path_factory.mktemp("service") / "data")
    started.start()
    yield started
    started.stop()


# --- life of the service -------------------------------------------------------------------------------------------------


def test_ready_line_names_every_address_and_sigterm_stops_cleanly(tmp_path: Path) -> None:
    service = Service(tmp_path / "data")
    service.start()
    assert service.ready_line == (
        f"magnetar standalone is ready: magnetar://127.0.0.1:{service.port} bookie://127.0.0.1:{service.bookie_port} "
        f"http://127.0.0.1:{service.http_port} data={tmp_path / 'data'}"
    )
    assert service.writer_pid != service.helper_pid != service.daemon_pid
    service.stop()  # asserts exit code 0, and that no helper is left
    (line,) = service.errors().splitlines()
    assert "SIGTERM, draining" in line


def test_second_sigterm_stops_at_once(tmp_path: Path) -> None:
    service = Service(tmp_path / "data")
    service.start()
    # Both are pending when the process looks: stopped, it cannot answer the first one before the second comes.
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT, signal.SIGTERM):
        os.kill(service.daemon_pid, number)
    service.wait_ended()
    assert service.returncode in (
        0,
        128 + signal.SIGTERM,
    )  # 0 when the drain was faster than the second signal


def test_messages_and_cursors_survive_a_restart(tmp_path: Path) -> None:
    service = Service(tmp_path / "data")
    service.start()
    succeeded(magnetar("produce", "orders", stdin="1\n2\n3\n", url=service.url))
    succeeded(
        magnetar("consume", "orders", "-s", "billing", "--start", "earliest", "-n", "2", url=service.url)
    )
    service.stop()
    service.start()
    assert succeeded(magnetar("consume", "orders", "-s", "billing", "-n", "1", url=service.url)) == "3\n"
    service.kill("daemon")
    service.start()
    assert (
        succeeded(magnetar("tail", "orders", "--start", "earliest", "-n", "3", url=service.url))
        == "1\n2\n3\n"
    )
    service.stop()


@pytest.mark.parametrize("victim", ["writer", "helper"])
def test_daemon_ends_when_a_helper_process_dies(tmp_path: Path, victim: str) -> None:
    service = Service(tmp_path / "data", arguments=["--log-format", "json"])
    service.start()
    service.kill(victim)
    assert service.returncode == 70
    (line,) = [json.loads(line) for line in service.errors().splitlines() if '"critical"' in line]
    assert "standalone stops" in line["event"]


def test_metrics_health_and_readiness(service: Service) -> None:
    address = f"http://127.0.0.1:{service.http_port}"
    with urllib.request.urlopen(f"{address}/health", timeout=10) as answer:
        assert json.load(answer)["status"] == "ok"
    with urllib.request.urlopen(f"{address}/health/live", timeout=10) as answer:
        assert json.load(answer) == {"live": True, "reasons": {}}
    with urllib.request.urlopen(f"{address}/health/ready", timeout=10) as answer:
        assert json.load(answer) == {"ready": True, "reasons": {}, "notes": {}}
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "magnetar_broker_messages_in_total" in text
    assert "magnetar_bookie_write_cache_bytes" in text
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{address}/nothing", timeout=10)


def test_the_administration_is_at_the_same_port(service: Service) -> None:
    address = f"http://127.0.0.1:{service.http_port}"
    with urllib.request.urlopen(f"{address}/admin/v2/clusters/standalone", timeout=10) as answer:
        assert json.load(answer)["serviceUrl"] == address
    with urllib.request.urlopen(
        f"{address}/lookup/v2/topic/persistent/public/default/any", timeout=10
    ) as answer:
        found = json.load(answer)
    assert (found["brokerUrl"], found["httpUrl"]) == (service.url, address)


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_are_served(service: Service) -> None:
    succeeded(magnetar("subscriptions", "create", "watched", "s", url=service.url))
    with urllib.request.urlopen(f"http://127.0.0.1:{service.http_port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    monitoring = Path(__file__).parents[2] / "deploy" / "monitoring"
    (group,) = yaml.safe_load((monitoring / "alerts.yaml").read_text())["groups"]
    dashboard = json.loads((monitoring / "dashboard.json").read_text())
    asked = [rule["expr"] for rule in group["rules"]]
    asked += [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(asked) > 30
    for expression in asked:
        names = re.findall(r"\b(?:magnetar|pulsar|process)_\w+", expression)
        assert names
        for name in names:
            family = re.sub("_(bucket|sum|count)$", "", name) if name not in kinds else name
            assert family in kinds, f"{name} in {expression} is not served"
            rises = kinds[family] in ("counter", "histogram")
            assert rises or f"rate({name}" not in expression, f"{expression} takes the rate of a gauge"
        for name, labels in re.findall(r"(\w+)\{(.*?)\}", expression):
            rows = re.findall(rf"^{name}\{{(.*)\}}", text, re.MULTILINE)
            for label in re.findall(r"(\w+)=~", labels):
                assert label == "instance" or any(f'{label}="' in row for row in rows), expression


def test_bookie_and_broker_as_daemons_of_their_own(tmp_path: Path) -> None:
    from bench.service_process import ServiceProcess

    bookie = ServiceProcess(tmp_path / "bookie", command="bookie")
    with bookie:
        listed = f"127.0.0.1:{bookie.ports['bookie']}"
        broker = ServiceProcess(tmp_path / "broker", command="broker", arguments=["--bookies", listed])
        with broker:
            succeeded(magnetar("produce", "orders", "-m", "over TCP", url=broker.url))
            broker.kill("daemon")
            broker.start()
            tail = magnetar("tail", "orders", "--start", "earliest", "-n", "1", url=broker.url)
            assert succeeded(tail) == "over TCP\n"
        assert broker.returncode == 0


# --- what goes wrong -----------------------------------------------------------------------------------------------------


def refused(arguments: list[str], code: int) -> str:
    """The one line that a daemon ends with."""
    began = time.monotonic()
    done = magnetar(*arguments, "--log-format", "json")
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert time.monotonic() - began < 30
    (line,) = done.stderr.splitlines()
    assert "Traceback" not in line
    return line


def free_ports() -> list[str]:
    return ["--port", "0", "--bookie-port", "0", "--http-port", "0", "--pulsar-port", "0"]


def test_second_process_on_the_same_data_directory(service: Service) -> None:
    line = refused(["standalone", "--data", str(service.data), *free_ports(), *AT_ONCE], 1)
    assert f"{service.data} is in use by another process (started by process {service.daemon_pid})" in line
    assert "choose another data directory" in line
    assert service.running


def test_a_second_process_with_the_ports_and_the_data_of_the_first_says_that_the_data_are_in_use(
    service: Service,
) -> None:
    ports = ["--port", "0", "--bookie-port", "0", "--http-port", str(service.http_port)]
    line = refused(["standalone", "--data", str(service.data), *ports, *AT_ONCE], 1)
    assert f"{service.data} is in use by another process" in line


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--port", "port"),
        ("--bookie-port", "bookie_port"),
        ("--http-port", "http_port"),
        ("--pulsar-port", "broker.pulsar_port"),
    ],
)
def test_port_in_use(tmp_path: Path, flag: str, setting: str) -> None:
    ports = dict(zip(free_ports()[::2], free_ports()[1::2], strict=True))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports[flag] = str(taken.getsockname()[1])
        arguments = [
            "standalone",
            "--data",
            str(tmp_path / "data"),
            *(part for pair in ports.items() for part in pair),
        ]
        line = refused(arguments, 1)
    assert f"port {ports[flag]} on 127.0.0.1 is in use" in line
    assert setting in line


def test_data_directory_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("not a directory")
    line = refused(["standalone", "--data", str(path), *free_ports()], 1)
    assert f"{path} is a file, not a directory; choose another data directory" in line
    assert path.read_text() == "not a directory"


def damaged(tmp_path: Path) -> Path:
    """The data directory of a service that stored a message and was stopped."""
    service = Service(tmp_path / "data")
    service.start()
    succeeded(magnetar("produce", "orders", "-m", "kept", url=service.url))
    service.stop()
    return tmp_path / "data"


def test_damaged_cookie(tmp_path: Path) -> None:
    data = damaged(tmp_path)
    cookie = data / "bookie" / "cookie"
    cookie.write_bytes(b"\xff" + cookie.read_bytes()[1:])
    line = refused(["standalone", "--data", str(data), *free_ports()], 1)
    assert "cookie" in line
    assert "damaged" in line


def test_missing_cookie_beside_data(tmp_path: Path) -> None:
    data = damaged(tmp_path)
    (data / "bookie" / "cookie").unlink()
    assert "cookie" in refused(["standalone", "--data", str(data), *free_ports()], 1)


def test_damaged_metadata_store(tmp_path: Path) -> None:
    data = damaged(tmp_path)
    (data / "metadata" / "CURRENT").write_text("nonsense")
    assert str(data / "metadata") in refused(["standalone", "--data", str(data), *free_ports()], 1)


@pytest.mark.parametrize("half", ["metadata", "bookie"])
def test_half_of_the_data_is_missing(tmp_path: Path, half: str) -> None:
    # Without its metadata a bookie is given its ledger ids again: a new topic showed the messages of an old one.
    data = damaged(tmp_path)
    (data / half).rename(tmp_path / "away")
    line = refused(["standalone", "--data", str(data), *free_ports()], 1)
    assert str(data / half) in line
    assert "restore both from one backup" in line
    assert not (data / half).exists()
    (tmp_path / "away").rename(data / half)
    service = Service(data)
    service.start()
    tail = magnetar("tail", "orders", "--start", "earliest", "-n", "1", url=service.url)
    assert succeeded(tail) == "kept\n"
    service.stop()


def test_broker_without_bookies(tmp_path: Path) -> None:
    line = refused(["broker", "--data", str(tmp_path / "data"), "--port", "0", "--http-port", "0"], 78)
    assert "--bookies host:port" in line


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["standalone", "--dta", "x"], 2, "did you mean --data?"),
        (["standalone", "--port"], 2, "--port needs a value"),
        (["standalone", "here"], 2, "no argument here"),
        (["standalone", "--port", "many"], 78, "daemon.port"),
        (["standalone", "--port", "70000"], 78, "at most 65535"),
        (["standalone", "--set", "nonsense"], 78, "section.name=value"),
        (["standalone", "--set", "bookie.nothing=1"], 78, "unknown setting bookie.nothing"),
        (["standalone", "--config", "/does/not/exist"], 78, "/does/not/exist"),
    ],
)
def test_wrong_command_lines(arguments: list[str], code: int, part: str) -> None:
    done = magnetar(*arguments)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert part in line


# --- messages ------------------------------------------------------------------------------------------------------------


def test_lines_go_round_by_pipes(service: Service) -> None:
    lines = "".join(f"line {number}\n" for number in range(5000)) + "\nlast, without an end"
    out = succeeded(magnetar("produce", "pipes", stdin=lines, url=service.url))
    assert out.startswith("stored 5,002 messages in pipes (last id ")
    received = magnetar("consume", "pipes", "-s", "s", "--start", "earliest", "-n", "5002", url=service.url)
    assert succeeded(received) == lines + "\n"
    empty = magnetar("consume", "pipes", "-s", "s", "--timeout", "0.3", url=service.url)
    assert succeeded(empty) == ""


def test_files_keys_and_json(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "flights.jsonl"
    path.write_text('{"carrier": "AA", "n": 1}\n{"carrier": "UA", "n": 2}\n')
    summary = json.loads(
        succeeded(
            magnetar(
                "produce", "json", "--file", str(path), "--key-field", "carrier", "--json", url=service.url
            )
        )
    )
    assert summary["messages"] == 2
    assert summary["topic"] == "json"
    out = succeeded(
        magnetar(
            "consume",
            "json",
            "-s",
            "s",
            "-t",
            "shared",
            "--start",
            "earliest",
            "-n",
            "2",
            "--json",
            url=service.url,
        )
    )
    first, second = map(json.loads, out.splitlines())
    assert (first["key"], json.loads(first["value"])["n"]) == ("AA", 1)
    assert (second["key"], second["topic"], second["redelivery_count"]) == (
        "UA",
        "persistent://public/default/json",
        0,
    )
    assert second["id"] == summary["last_id"]
    # From an id, inclusive.
    again = magnetar("tail", "json", "--start", second["id"], "-n", "1", "--json", url=service.url)
    assert json.loads(succeeded(again))["id"] == second["id"]


def test_values_that_are_no_text(service: Service) -> None:
    succeeded(magnetar("produce", "bytes", stdin=b"\xff\xfe\n", url=service.url))
    out = succeeded(magnetar("tail", "bytes", "--start", "earliest", "-n", "1", "--json", url=service.url))
    assert json.loads(out)["value_base64"] == "//4="


def test_everything_that_a_message_can_have(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "payload"
    path.write_bytes(b"many\nlines \xff\n" * 10_000)
    sent = magnetar(
        *("produce", "whole", "--payload", str(path), "--key", "AA", "--compression", "zstd"),
        *("--property", "run=7", "--property", "query=a=b", "--event-time", "2026-01-31T12:00:00Z"),
        url=service.url,
    )
    assert succeeded(sent).startswith("stored 1 message in whole")
    succeeded(magnetar("produce", "whole", "--payload", "-", stdin=b"from a pipe\n", url=service.url))
    with connect(service.url) as client:
        assert client.admin.topic_stats("whole")["stored_bytes"] < 10_000
    first, second = stored(service, "whole", 2)
    assert first.value == path.read_bytes()
    assert (first.key, first.properties) == ("AA", {"run": "7", "query": "a=b"})
    assert first.event_time == 1769860800000
    assert (second.value, second.key, second.event_time) == (b"from a pipe\n", None, None)


def stored(service: Service, topic: str, count: int) -> list[Message]:
    """The first messages, and nothing follows them."""
    with connect(service.url) as client, client.create_reader(topic, start="earliest") as reader:
        messages = [reader.receive(20) for _ in range(count)]
        assert not reader.has_message_available()
    return messages


def test_a_line_that_is_too_long_is_named_with_what_is_stored_before_it(service: Service) -> None:
    lines = b"1\n2\n" + bytes((5 << 20) + 1) + b"\n4\n"
    done = magnetar("produce", "long", stdin=lines, url=service.url)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("magnetar: line 3: a message of 5242881 bytes exceeds the limit of 5242880")
    assert line.endswith("(messages stored before it: 2)")
    assert [message.value for message in stored(service, "long", 2)] == [b"1", b"2"]


ENDS = pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])


@ENDS
def test_a_producer_that_is_ended_tells_what_is_stored(
    service: Service, end: signal.Signals, code: int
) -> None:
    topic = f"producer-{end.name}"
    line = [*MAGNETAR, "produce", topic, "--url", service.url]
    with (
        connect(service.url) as client,
        client.create_reader(topic, start="earliest") as reader,
        subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as producing,
    ):  # fmt: skip
        assert producing.stdin is not None
        producing.stdin.write(b"1\n2\nhalf")
        producing.stdin.flush()
        ids = [str(reader.receive(20).id) for _ in range(2)]
        producing.send_signal(end)
        producing.wait(timeout=20)  # before its input ends
        out, errors = producing.communicate()
    assert producing.returncode == code
    assert out.decode() == f"stored 2 messages in {topic} (last id {ids[-1]})\n"
    assert errors == b""


def test_what_is_measured_until_sigterm_is_shown(service: Service) -> None:
    line = [*MAGNETAR, "perf", "produce", "sigterm-perf", "--url", service.url]
    with (
        connect(service.url) as client,
        client.create_reader("sigterm-perf", start="earliest") as reader,
        subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as measuring,
    ):
        reader.receive(20)
        measuring.send_signal(signal.SIGTERM)
        out, _ = measuring.communicate(timeout=20)
    assert measuring.returncode == -signal.SIGTERM
    assert out.startswith("produced: ")


def test_tail_of_a_misspelt_topic_says_so_and_ends_by_sigterm(service: Service) -> None:
    line = [*MAGNETAR, "tail", "sigterm-tail", "--url", service.url]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        assert tail.stderr is not None
        told = tail.stderr.readline()
        with connect(service.url) as client:
            deadline = time.monotonic() + 20
            while "sigterm-tail" not in str(client.admin.list_topics()):
                assert time.monotonic() < deadline
        succeeded(magnetar("produce", "sigterm-tail", "-m", "1", url=service.url))
        assert tail.stdout.readline() == "1\n"
        tail.send_signal(signal.SIGTERM)
        _, errors = tail.communicate(timeout=20)
    assert tail.returncode == -signal.SIGTERM
    assert told.startswith("magnetar: topic sigterm-tail did not exist; it is made now, and empty")
    assert errors == ""


def test_on_a_terminal_a_message_is_shown_with_its_id_and_key(service: Service) -> None:
    with connect(service.url) as client, client.create_producer("tty") as producer:
        producer.send(b"\x1b[2J\xff", "AA")
    ours, theirs = pty.openpty()
    line = [*MAGNETAR, "consume", "tty", "-s", "s", "--start", "earliest", "-n", "1", "--url", service.url]
    with subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs) as consuming:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the command has ended
            while block := os.read(ours, 4096):
                shown += block
        os.close(ours)
    assert consuming.returncode == 0
    told, text = re.sub(r"\x1b\[[02]m", "", shown.decode()).split("\r\n", 1)
    assert told.startswith("magnetar: subscription s of tty is new; ")
    assert re.fullmatch(r"\d+:0:0  \d{4}-\d\d-\d\d [\d:.]{12}  key=AA  \\x1b\[2J\\xff\r\n", text)


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_a_closed_stream_is_told(closed: str) -> None:
    # The next socket would have its number: libuv aborts, and what is printed would be written to the socket.
    command = f"exec {shlex.join([*MAGNETAR, 'topics', 'list'])} {closed}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(
        r"magnetar: standard (input|output) is closed; redirect it to /dev/null\n", done.stderr
    )


@ENDS
def test_a_consumer_that_is_ended_acknowledges_what_was_printed(
    service: Service, end: signal.Signals, code: int
) -> None:
    topic = f"ended-by-{end.name}"
    succeeded(magnetar("produce", topic, stdin="1\n2\n", url=service.url))
    line = [*MAGNETAR, "consume", topic, "-s", "s", "--start", "earliest", "--url", service.url]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as consuming:
        assert consuming.stdout is not None
        assert [consuming.stdout.readline(), consuming.stdout.readline()] == ["1\n", "2\n"]
        consuming.send_signal(end)
        _, errors = consuming.communicate(timeout=20)
    assert consuming.returncode == code
    [told] = errors.splitlines()
    assert told.startswith(f"magnetar: subscription s of {topic} is new; messages are kept for it until")
    rest = magnetar("consume", topic, "-s", "s", "--timeout", "0.3", url=service.url)
    assert succeeded(rest) == ""


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["produce", "bad name!", "-m", "x"], 2, "not a topic name"),
        (["consume", "t", "-s", "bad name!"], 2, "not a subscription name"),
        (["produce", "t", "--key-field", "k", "-m", "not json"], 1, "message 1: it is no JSON object"),
        (["produce", "t", "--key-field", "k", "-m", "{}"], 1, "with a field 'k'; leave out --key-field"),
        (["topics", "stats", "no-such-topic"], 1, "no-such-topic does not exist"),
        (
            ["consume", "no-such-topic", "-s", "s", "--format", "{keys}"],
            2,
            "has no field 'keys' (want id, topic, key",
        ),
        (["subscriptions", "clear", "no-such-topic", "s"], 2, "--yes"),
        (["topics", "delete", "no-such-topic"], 2, "--yes"),
    ],
)
def test_failures_are_one_line(service: Service, arguments: list[str], code: int, part: str) -> None:
    done = magnetar(*arguments, url=service.url)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert line.startswith("magnetar: ")
    assert part in line


def test_no_service_there() -> None:
    with holding_port() as port:
        done = magnetar("produce", "t", "-m", "x", "--url", f"magnetar://127.0.0.1:{port}")
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# --- administration ------------------------------------------------------------------------------------------------------


def test_topics_and_subscriptions(service: Service) -> None:
    succeeded(magnetar("produce", "admin", "-m", "1", "-m", "2", url=service.url))
    succeeded(magnetar("consume", "admin", "-s", "half", "--start", "earliest", "-n", "1", url=service.url))
    assert "admin" in succeeded(magnetar("topics", "list", url=service.url)).splitlines()
    names = json.loads(succeeded(magnetar("topics", "list", "public/default", "--json", url=service.url)))
    assert "persistent://public/default/admin" in names
    stats = json.loads(succeeded(magnetar("topics", "stats", "admin", "--json", url=service.url)))
    assert stats["stored_messages"] == 2
    assert stats["subscriptions"]["half"]["backlog_messages"] == 1
    assert "half" in succeeded(magnetar("topics", "stats", "admin", url=service.url))
    assert "half" in succeeded(magnetar("subscriptions", "list", "admin", url=service.url))
    succeeded(magnetar("subscriptions", "delete", "admin", "half", "--yes", url=service.url))
    assert json.loads(succeeded(magnetar("subscriptions", "list", "admin", "--json", url=service.url))) == {}
    succeeded(magnetar("topics", "delete", "admin", "--yes", url=service.url))
    assert "admin" not in succeeded(magnetar("topics", "list", url=service.url)).splitlines()


def test_a_subscription_is_made_moved_and_looked_into(service: Service) -> None:
    with connect(service.url) as client:
        succeeded(magnetar("subscriptions", "create", "ops", "jobs", url=service.url))
        with client.create_producer("ops") as producer:
            ids = [producer.send(b"%d" % number, key=f"k{number}") for number in range(6)]

        def backlog() -> int:
            found: int = client.admin.topic_stats("ops")["subscriptions"]["jobs"]["backlog_messages"]
            return found

        shown = magnetar(
            *("subscriptions", "peek", "ops", "jobs", "-n", "2", "--format", r"{key}\t{value}"),
            url=service.url,
        )
        assert succeeded(shown) == "k0\t0\nk1\t1\n"
        skipped = magnetar("subscriptions", "skip", "ops", "jobs", "-n", "4", "--json", url=service.url)
        assert json.loads(succeeded(skipped)) == {"skipped": 4}
        assert backlog() == 2
        moved = magnetar("subscriptions", "seek", "ops", "jobs", "--to", str(ids[1]), url=service.url)
        assert succeeded(moved) == f"subscription jobs of ops goes on at {ids[1]}; 5 messages to come\n"
        with client.subscribe("ops", "jobs", type="shared", name="ann") as consumer:
            assert consumer.receive(20).value == b"1"
            stats = succeeded(magnetar("subscriptions", "stats", "ops", "jobs", url=service.url))
        assert "ann" in stats
        assert re.search(r"backlog messages +│ +5 ", stats)
        rest = magnetar(
            *"consume ops -s jobs -t shared --no-follow --format {value}".split(), url=service.url
        )
        assert succeeded(rest) == "1\n2\n3\n4\n5\n"
        client.admin.seek_subscription("ops", "jobs", "earliest")
        cleared = magnetar("subscriptions", "clear", "ops", "jobs", "--yes", url=service.url)
        assert succeeded(cleared) == "skipped all messages of jobs in ops, 6 at most\n"
        assert backlog() == 0


def test_perf(service: Service) -> None:
    for batch in ("1", "100"):
        sent = magnetar(
            "perf", "produce", "perf", "--messages", "2000", "--batch", batch, "--json", url=service.url
        )
        figures = json.loads(succeeded(sent))
        assert figures["messages"] == 2000
        assert figures["latency"]["p99_ms"] > 0
    consumed = magnetar("perf", "consume", "perf", "--messages", "4000", url=service.url)
    assert succeeded(consumed).startswith("consumed: 4,000 messages")
    tailed = magnetar(
        "perf", "tail", "perf", "--start", "earliest", "--messages", "4000", "--json", url=service.url
    )
    assert json.loads(succeeded(tailed))["messages"] >= 4000


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_perf_consume_leaves_no_subscription(service: Service, end: signal.Signals) -> None:
    line = [*MAGNETAR, "perf", "consume", "unpinned", "--url", service.url]
    with connect(service.url) as client:
        client.admin.create_topic("unpinned")

        def wait_for(subscriptions: list[str]) -> None:
            deadline = time.monotonic() + 20
            while list(client.admin.topic_stats("unpinned")["subscriptions"]) != subscriptions:
                assert time.monotonic() < deadline
                time.sleep(0.02)

        with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as consuming:
            wait_for(["perf"])
            consuming.send_signal(end)
        wait_for([])


def test_perf_times_a_message_when_it_is_stored(service: Service) -> None:
    # At a low rate nothing fills the window; the times were taken at the end of the run: p50 was half of it.
    for batch in ("1", "100"):
        sent = magnetar(
            *f"perf produce rate --rate 100 -n 150 --batch {batch} --json".split(), url=service.url
        )
        figures = json.loads(succeeded(sent))
        assert figures["messages"] == 150
        assert figures["latency"]["p50_ms"] < 500


@pytest.mark.parametrize("command", ["tail t-full --start earliest -n 1", "topics list"])
def test_output_that_cannot_be_written(service: Service, command: str) -> None:
    succeeded(magnetar("produce", "t-full", "-m", "x", url=service.url))
    with open("/dev/full", "wb") as full:
        line = [*MAGNETAR, *command.split(), "--url", service.url]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "magnetar: cannot write the output: No space left on device\n"


def test_config_tells_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "magnetar.toml"
    file.write_text('[daemon]\nport = 1111\ndata = "/srv/data"\nhttp_port = 2222\n')
    line = [*MAGNETAR, "config", "--json", "--config", str(file), "--set", "daemon.http_port=3333"]
    environment = {**os.environ, "MAGNETAR_DAEMON_BOOKIE_PORT": "4444", "MAGNETAR_DAEMON_PORT": "5555"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    daemon = json.loads(done.stdout)["daemon"]
    found = {
        name: (daemon[name]["value"], daemon[name]["source"])
        for name in ("port", "data", "http_port", "bookie_port", "host")
    }
    assert found == {
        "port": (5555, "environment"),
        "data": ("/srv/data", str(file)),
        "http_port": (3333, "flag"),
        "bookie_port": (4444, "environment"),
        "host": ("127.0.0.1", "default"),
    }
    assert json.loads(done.stdout)["bookie"]["data_directory"]["value"] == "/srv/data/bookie"


def test_config_is_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "magnetar.toml"
    file.write_text(succeeded(magnetar("config", "--set", "daemon.port=1111")))
    assert (
        json.loads(succeeded(magnetar("config", "--config", str(file), "--json")))["daemon"]["port"]["value"]
        == 1111
    )


def test_help_and_completion() -> None:
    assert "standalone" in succeeded(magnetar("--help"))
    for command in ("standalone", "bookie", "broker"):
        assert "--set" in succeeded(magnetar(command, "--help"))
    # Otherwise typer looks for a shell that it knows among its parent processes; the tests may run below any.
    named = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = subprocess.run(
        [*MAGNETAR, "--show-completion", "bash"], env=named, capture_output=True, text=True, check=False
    )
    assert "complete" in script.stdout + script.stderr
