"""The Kubernetes manifests against Kubernetes' own schemas, and built by the real kustomize."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.unit.deploy.test_kubernetes import DEPLOY, documents, named

VERSIONS = ("1.28", "1.37")
"""The oldest and the newest Kubernetes that the manifests are checked for."""


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(version: str) -> None:
    """Each object, strictly: a field that Kubernetes would ignore is a mistake."""
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)


def test_kustomize_builds_the_whole() -> None:
    """With the real program, where it is installed."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    built = subprocess.run(
        [kubectl, "kustomize", str(DEPLOY / "kubernetes" / "example")], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    objects = list(yaml.safe_load_all(built.stdout))
    generated = 1
    assert len(objects) == len(documents()) + generated
    assert {one["metadata"].get("namespace", "tidegate") for one in objects} == {"tidegate"}
    conf = next(one for one in objects if named(one).startswith("ConfigMap/nats-"))["data"]
    assert conf["nats.conf"] == (DEPLOY / "nats-cluster" / "nats.conf").read_text()
    front = next(one for one in objects if named(one) == "Deployment/ingress")
    names = [one["name"] for one in front["spec"]["template"]["spec"]["containers"][0]["env"]]
    assert "TIDEGATE_INGRESS_TOKENIZERS" in names


def test_kustomize_adds_tls(tmp_path: Path) -> None:
    """An overlay of the house with the component: one more volume, the service on 443, the probe beside TLS."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    deploy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, deploy, ignore=shutil.ignore_patterns("*.py", "__pycache__", "wheelhouse"))
    overlay = deploy / "kubernetes" / "overlay"
    overlay.mkdir()
    kind = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
    (overlay / "kustomization.yaml").write_text(f"{kind}resources: [../house]\ncomponents: [../tls]\n")
    built = subprocess.run([kubectl, "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    objects = {named(one): one for one in yaml.safe_load_all(built.stdout)}
    for version in VERSIONS:
        for name in ("Deployment/ingress", "Service/ingress"):
            kubernetes_validate.validate(objects[name], version, strict=True)
    pod = objects["Deployment/ingress"]["spec"]["template"]["spec"]
    assert {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume} == {
        "nats-users",
        "front-door",
        "front-door-tls",
    }
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["port"] == "health"
    assert [port["port"] for port in objects["Service/ingress"]["spec"]["ports"]] == [443]
