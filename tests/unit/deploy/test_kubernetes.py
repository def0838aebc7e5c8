"""The Kubernetes manifests against our settings and users, and against each other."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bus.permissions import users
from bus.settings import load_settings
from services.ingress.config import IngressSettings
from tests.unit.deploy.test_compose_file import settings_type

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
FOLDERS = (DEPLOY / "nats-cluster", DEPLOY / "kubernetes" / "house", DEPLOY / "kubernetes" / "example")
WORKLOADS = ("Deployment", "StatefulSet")


@cache
def documents() -> tuple[dict[str, Any], ...]:
    """Every object of the manifests."""
    files = [file for folder in FOLDERS for file in sorted(folder.glob("*.yaml")) if file.stem != "kustomization"]
    return tuple(one for file in files for one in yaml.safe_load_all(file.read_text()))


def named(document: dict[str, Any]) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def workloads() -> list[dict[str, Any]]:
    return [one for one in documents() if one["kind"] in WORKLOADS]


def containers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every container with the pod that it is in."""
    pods = [one["spec"]["template"]["spec"] for one in workloads()]
    return [(pod, container) for pod in pods for container in pod["containers"]]


def ours() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(pod, container) for pod, container in containers() if container["image"] == "tidegate"]


def environment(container: dict[str, Any]) -> dict[str, str]:
    """As the process sees it, of what is written here; names of pods are examples."""
    shared = next(one for one in documents() if named(one) == "ConfigMap/tidegate")["data"]
    found = dict(shared) if container.get("envFrom") else {}
    found |= {one["name"]: one.get("value", "pod-0") for one in container.get("env", ())}
    return {name: value for name, value in found.items() if name.startswith("TIDEGATE_")}


def test_every_file_is_in_a_kustomization() -> None:
    """What lies there is applied, and what is to be applied lies there."""
    for folder in FOLDERS:
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        files = {name for name in kustomization["resources"] if name.endswith(".yaml")}
        assert files == {file.name for file in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert [name for name in kustomization["resources"] if not (folder / name).exists()] == []


def test_every_service_runs_with_settings_that_exist() -> None:
    """One workload each, its environment loads, and it stops before Kubernetes loses patience."""
    modules = set()
    for pod, container in ours():
        module = container["command"][-1]
        modules.add(module)
        section = module.rpartition(".")[2]
        settings = load_settings(section, settings_type(module), environ=environment(container))
        paused = float(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])[1])
        assert pod["terminationGracePeriodSeconds"] > settings.stop_timeout_s + paused, module
    services = {f"services.{path.parent.name}" for path in (DEPLOY.parent / "services").glob("*/__main__.py")}
    assert modules == services | {"load.engine"}


def test_every_service_has_its_own_user_of_the_bus() -> None:
    """A user that the accounts have, and no password but its own in the pod."""
    made = {user.name for user in users()}
    for pod, container in ours():
        user = environment(container).get("TIDEGATE_NATS_USER")
        if container["command"][-1] == "load.engine":
            assert user is None
            continue
        assert user == container["command"][-1].rpartition(".")[2]
        assert user in made
        mounted = {volume["name"]: volume["secret"]["items"] for volume in pod["volumes"] if "secret" in volume}
        assert mounted.pop("nats-user") == [{"key": user, "path": "password"}]
        assert mounted.keys() == ({"front-door"} if user == "ingress" else set())


def test_secrets_are_read_only_files_that_can_change() -> None:
    """Every secret is mounted read-only and as a folder (a ``subPath`` stays as it was); settings that name files below
    it name files that it has; no secret is in an environment."""
    for pod, container in ours():
        secrets = {one["name"]: one["secret"] for one in pod.get("volumes", ()) if "secret" in one}
        files = set()
        for mount in (one for one in container.get("volumeMounts", ()) if one["name"] in secrets):
            assert mount["readOnly"] is True
            assert "subPath" not in mount
            files |= {f"{mount['mountPath']}/{item['path']}" for item in secrets[mount["name"]]["items"]}
        said = environment(container)
        assert {value for value in said.values() if value.startswith("/run/tidegate/")} == files
        assert not [name for name in said if name.endswith(("_PASSWORD", "_SECRET", "_API_KEY", "_TOKEN"))]
        assert not [one for one in container.get("env", ()) if "secretKeyRef" in one.get("valueFrom", {})]


def test_the_part_with_tls_fits_the_front_door() -> None:
    """Its settings load, its files are mounted read-only, the probe asks a port without TLS."""
    component = yaml.safe_load((DEPLOY / "kubernetes" / "tls" / "kustomization.yaml").read_text())
    door, service = (yaml.safe_load(patch["patch"]) for patch in component["patches"])
    ((pod, container),) = [(pod, one) for pod, one in ours() if one["command"][-1] == "services.ingress"]
    added = {change["path"].rpartition("containers/0/")[2]: change["value"] for change in door}
    assert added["readinessProbe/httpGet/port"] in {port["name"] for port in container["ports"]}
    variables = {
        change["value"]["name"]: change["value"]["value"] for change in door if change["path"].endswith("env/-")
    }
    settings = load_settings("ingress", IngressSettings, environ=environment(container) | variables)
    mount = added["volumeMounts/-"]
    assert mount["readOnly"] is True
    assert {settings.tls_cert, settings.tls_key} == {f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key")}
    assert mount["name"] not in {volume["name"] for volume in pod["volumes"]}
    assert service[0]["value"]["targetPort"] in {port["name"] for port in container["ports"]}


def test_every_container_is_watched_and_locked_in() -> None:
    """Probes on a port that is open, a memory limit, no root, no privileges, nothing to write but its volumes, no
    token of the cluster."""
    for pod, container in containers():
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = [container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in container]
        assert "readinessProbe" in container
        assert {probe["httpGet"]["port"] for probe in probes} <= ports.keys()
        served = environment(container)
        if container["image"] == "tidegate":
            assert set(map(str, ports.values())) <= {
                served.get("TIDEGATE_HTTP_PORT"),
                served.get("TIDEGATE_INGRESS_PORT"),
            }
        assert container["resources"]["limits"]["memory"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False


def test_nothing_that_is_there_twice_goes_at_once() -> None:
    """A disruption budget for each, and it selects its pods; the front door grows with its load."""
    budgets = {one["metadata"]["name"]: one["spec"] for one in documents() if one["kind"] == "PodDisruptionBudget"}
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in documents() if one["kind"] == "HorizontalPodAutoscaler"}
    assert scaled == {"ingress"}
    for one in workloads():
        name = one["metadata"]["name"]
        assert one["spec"]["selector"]["matchLabels"].items() <= one["spec"]["template"]["metadata"]["labels"].items()
        if (one["spec"].get("replicas", 1) == 1 and name not in scaled) or name == "engine":
            continue
        assert budgets[name]["maxUnavailable"] == 1
        assert budgets[name]["selector"] == one["spec"]["selector"]


def test_network_policies_name_pods_and_ports_that_exist() -> None:
    """Each selects something; every port that they open is one that somebody has."""
    pods = [one["spec"]["template"] for one in workloads()]
    ports = {port["containerPort"] for _, container in containers() for port in container["ports"]} | {53}
    for policy in (one for one in documents() if one["kind"] == "NetworkPolicy"):
        wanted = policy["spec"]["podSelector"]["matchLabels"].items()
        assert any(wanted <= pod["metadata"]["labels"].items() for pod in pods), named(policy)
        rules = (*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ()))
        assert {port["port"] for rule in rules for port in rule.get("ports", ())} <= ports, named(policy)
