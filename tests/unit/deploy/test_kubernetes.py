"""The manifests fit the schemas of Kubernetes, and their parts fit each other and Magnetar."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from support.daemon_lines import daemon_settings

BASE = Path(__file__).parents[3] / "deploy" / "kubernetes" / "base"
DAEMONS = {"magnetar-bookie": "bookie", "magnetar-broker": "broker", "magnetar-autorecovery": "autorecovery"}


def resources() -> list[dict[str, Any]]:
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == sorted(path.name for path in BASE.iterdir())
    return [found for name in listed for found in yaml.safe_load_all((BASE / name).read_text())]


def workloads() -> dict[str, dict[str, Any]]:
    return {
        found["metadata"]["name"]: found
        for found in resources()
        if found["kind"] in ("StatefulSet", "Deployment")
    }


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {found["metadata"]["name"]: found for found in resources() if found["kind"] == kind}


def pod_of(name: str) -> dict[str, Any]:
    pod: dict[str, Any] = workloads()[name]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_all_fit_the_schemas(version: str) -> None:
    for resource in resources():
        kubernetes_validate.validate(resource, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):  # the check can fail
        kubernetes_validate.validate(
            {**of_kind("Service")["magnetar"], "spec": {"ports": "7650"}}, version, strict=True
        )


@pytest.mark.real
def test_kustomize_builds_them() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    built = subprocess.run(["kubectl", "kustomize", str(BASE)], capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    found = list(yaml.safe_load_all(built.stdout))
    assert len(found) == len(resources())
    assert {one["metadata"]["namespace"] for one in found if one["kind"] != "Namespace"} == {"magnetar"}
    assert "image: magnetar:0.1.0" in built.stdout
    assert "image: zookeeper:3.9.3" in built.stdout


@pytest.mark.parametrize("name", DAEMONS)
def test_the_arguments_and_variables_are_settings(name: str) -> None:
    pod = pod_of(name)
    (container,) = pod["containers"]
    environment = dict(of_kind("ConfigMap")["magnetar-settings"]["data"])
    assert container["envFrom"] == [{"configMapRef": {"name": "magnetar-settings"}}]
    variables = {variable["name"]: f"{variable['name'].lower()}-0" for variable in container.get("env", ())}
    line = list(container["args"])
    for variable, value in variables.items():
        line = [argument.replace(f"$({variable})", value) for argument in line]
    assert not any("$(" in argument for argument in line), line
    settings = daemon_settings(line, environment)
    assert line[0] == DAEMONS[name]
    assert settings.daemon.drain_s < pod["terminationGracePeriodSeconds"]
    assert settings.ledger.placement == "zone"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    own = {
        "bookie": settings.daemon.bookie_port,
        "magnetar": settings.daemon.port,
        "pulsar": settings.broker.pulsar_port,
    }
    for port_name, port in ports.items():
        assert port == own.get(port_name, settings.daemon.http_port)
    if name != "magnetar-autorecovery":
        service = of_kind("Service")[name]["spec"]
        assert service["clusterIP"] == "None"
        assert {port["name"]: port["port"] for port in service["ports"]} == ports
        assert settings.daemon.advertised_host == f"pod_name-0.{name}.namespace-0.svc"
        assert workloads()[name]["spec"]["serviceName"] == name
        assert workloads()[name]["spec"]["updateStrategy"] == {"type": "OnDelete"}
    if name == "magnetar-broker":
        assert (settings.broker.name, settings.broker.zone) == ("pod_name-0", "zone-0")
    if name == "magnetar-bookie":
        assert (settings.bookie.bookie_id, settings.bookie.zone) == ("pod_name-0", "zone-0")


@pytest.mark.parametrize("name", DAEMONS)
def test_probes_and_security(name: str) -> None:
    pod = pod_of(name)
    assert pod["enableServiceLinks"] is False, "MAGNETAR_BROKER_PORT=tcp://... would be taken for a setting"
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in (*pod["containers"], *pod["initContainers"]):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]
    (container,) = pod["containers"]
    paths = {
        probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")
    }
    assert paths == {"startup": "/health/live", "liveness": "/health/live", "readiness": "/health/ready"}


def test_every_set_has_a_budget_and_selects_its_own_pods() -> None:
    for name, workload in workloads().items():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"] == labels
        if workload["kind"] == "StatefulSet":
            budget = of_kind("PodDisruptionBudget")[name]["spec"]
            assert budget == {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
            service = of_kind("Service")[workload["spec"]["serviceName"]]["spec"]
            assert service["selector"] == labels
        affinity = str(workload["spec"]["template"]["spec"]["affinity"])
        assert "podAntiAffinity" in affinity
        assert str(labels) in affinity


def test_the_metadata_are_those_of_the_ensemble() -> None:
    address = of_kind("ConfigMap")["magnetar-settings"]["data"]["MAGNETAR_DAEMON_METADATA"]
    count = workloads()["zookeeper"]["spec"]["replicas"]
    hosts = ",".join(f"zookeeper-{number}.zookeeper:2181" for number in range(count))
    assert address == f"zk://{hosts}/magnetar"
