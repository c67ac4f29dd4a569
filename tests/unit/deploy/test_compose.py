"""The compose file and the Dockerfile: the official schema, and what they say fits each other and Magnetar."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.daemon_lines import daemon_settings

REPOSITORY = Path(__file__).parents[3]
COMPOSE = REPOSITORY / "deploy" / "compose" / "compose.yaml"
DOCKERFILE = REPOSITORY / "deploy" / "Dockerfile"


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def check_schema(path: Path) -> int:
    line = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(line, capture_output=True, timeout=60).returncode


@pytest.mark.real
def test_it_fits_the_schema_of_compose_files(tmp_path: Path) -> None:
    assert check_schema(COMPOSE) == 0
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.read_text().replace("stop_grace_period", "stop_patience"))
    assert check_schema(wrong) == 1


def test_the_daemons_have_good_settings_and_time_to_stop() -> None:
    urls, pulsar_urls, names = [], [], []
    for name, service in services().items():
        line = service.get("command", [""])
        if line[0] not in ("bookie", "broker"):
            continue
        line = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", part) for part in line]
        settings = daemon_settings(line, service["environment"])
        assert settings.daemon.drain_s < float(service["stop_grace_period"].rstrip("s"))
        published = [port.rpartition(":")[2] for port in service["ports"]]
        assert str(settings.daemon.http_port) in published
        assert f":{settings.daemon.http_port}/health/ready" in service["healthcheck"]["test"][-1]
        if line[0] == "broker":
            assert {str(settings.daemon.port), str(settings.broker.pulsar_port)} <= set(published)
            assert settings.broker.name == name
            urls.append(settings.broker.service_url.partition("://")[2])
            pulsar_urls.append(settings.broker.pulsar_url_for_clients.partition("://")[2])
        else:
            assert settings.bookie.bookie_id == settings.daemon.advertised_host == name
            assert service["volumes"] == [f"{name}:/data"]
        names.append(name)
    assert names == ["bookie-1", "bookie-2", "bookie-3", "broker-1", "broker-2"]
    for scheme, found in (("magnetar", urls), ("pulsar", pulsar_urls)):
        assert f"{scheme}://{','.join(found)}" in COMPOSE.read_text()


def test_what_is_named_is_there() -> None:
    compose = yaml.safe_load(COMPOSE.read_text())
    mounted = {
        volume.partition(":")[0] for service in services().values() for volume in service.get("volumes", ())
    }
    assert mounted == set(compose["volumes"])
    for service in services().values():
        assert set(service.get("depends_on", ())) <= set(services())
        if "build" in service:
            assert (COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]).samefile(
                DOCKERFILE
            )
    hosts = re.findall(
        r"zookeeper-\d:2181", services()["bookie-1"]["environment"]["MAGNETAR_DAEMON_METADATA"]
    )
    assert hosts == [f"{name}:2181" for name in services() if name.startswith("zookeeper")]


def test_the_image_has_what_it_copies_and_runs_as_nobody_in_particular() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    text = DOCKERFILE.read_text()
    lines = [
        line.split() for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")
    ]
    copied = [
        part for line in lines if line[0] == "COPY" and "--from=build" not in line for part in line[1:-1]
    ]
    assert copied == ["pyproject.toml", "README.md", "LICENSE", "proto", "bookie", "broker", "client"]
    ignored = (REPOSITORY / "deploy" / "Dockerfile.dockerignore").read_text().split()
    for path in copied:
        assert (REPOSITORY / path).exists()
        assert f"!{path}" in ignored
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert f"magnetar:{project['version']}" in text
    assert services()["broker-1"]["image"] == f"magnetar:{project['version']}"
    kinds = [line[0] for line in lines]
    assert set(kinds) <= set("FROM WORKDIR RUN COPY ENV USER VOLUME EXPOSE STOPSIGNAL ENTRYPOINT CMD".split())
    images = [line[1] for line in lines if line[0] == "FROM"]
    assert all(":" in image and not image.endswith(":latest") for image in images)
    (user,) = (line[1] for line in lines if line[0] == "USER")
    assert user == "10001:10001"
    assert kinds.index("ENTRYPOINT") > kinds.index("USER") > kinds.index("VOLUME") - 3
