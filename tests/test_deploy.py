"""The manifests and the image that ship: what KubeRay's schema, Kueue and this library ask of them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.test_docs import check

pytestmark = pytest.mark.ring0
DEPLOY = Path(__file__).parents[1] / "deploy"
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))
CRD = os.environ.get("KUBERAY_CRD", "")
JOB = {
    "entrypoint",
    "backoffLimit",
    "shutdownAfterJobFinishes",
    "runtimeEnvYAML",
    "rayClusterSpec",
    "suspend",
}
CLUSTER = {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def loaded(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_a_manifest_is_a_job_of_kuberay_whose_command_exists(file: Path) -> None:
    made = loaded(file)
    assert (made["apiVersion"], made["kind"]) == ("ray.io/v1", "RayJob")
    job, cluster = made["spec"], made["spec"]["rayClusterSpec"]
    assert job.keys() <= JOB
    assert cluster.keys() <= CLUSTER
    assert job["shutdownAfterJobFinishes"] is True
    check(job["entrypoint"], whole=True)
    environment = yaml.safe_load(job["runtimeEnvYAML"])["env_vars"]
    assert all(isinstance(value, str) for value in environment.values())
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() <= GROUP
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["groupName"] != "head"
    most = sum(group["maxReplicas"] for group in cluster["workerGroupSpecs"])
    words = shlex.split(job["entrypoint"])
    assert int(words[words.index("--workers") + 1].partition(":")[2]) == most
    for pod in pods(cluster):
        for container in pod["containers"]:
            mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
            assert mounts <= {volume["name"] for volume in pod.get("volumes", ())}
            assert container["resources"]["requests"] == container["resources"]["limits"]


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_workers_have_shared_memory_and_time_to_drain(file: Path) -> None:
    for group in loaded(file)["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
        drain = {e["name"]: e["value"] for e in container["env"]}["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
        assert float(drain) < pod["terminationGracePeriodSeconds"]


def test_a_job_of_kueue_has_what_its_webhook_asks_for() -> None:
    made = loaded(DEPLOY / "kueue.yaml")
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    spec = made["spec"]
    assert spec["suspend"] is True
    assert not spec["rayClusterSpec"].get("enableInTreeAutoscaling")  # refused, unless it is elastic to Kueue
    assert len(spec["rayClusterSpec"]["workerGroupSpecs"]) <= 7


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema of Kubernetes as JSON schema in which a field that it does not have is an error."""
    made = {name: value for name, value in schema.items() if not name.startswith("x-kubernetes")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "properties" in schema:
        made["properties"] = {name: strict(inner) for name, inner in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            made[name] = strict(schema[name])
    return made


@pytest.mark.skipif(not CRD, reason="KUBERAY_CRD names no file: ray.io_rayjobs.yaml of a release of KubeRay")
@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_a_manifest_fits_the_published_schema(file: Path) -> None:
    versions = {version["name"]: version for version in loaded(Path(CRD))["spec"]["versions"]}
    schema = strict(versions["v1"]["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(loaded(file), schema)
    broken = loaded(file)
    broken["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["graceSeconds"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


def test_the_image_copies_what_exists_and_runs_as_nobody_special() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    allowed = {
        line[1:] for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    for line in lines:
        if line.startswith("COPY "):
            sources = [word for word in line.split()[1:-1] if not word.startswith("--")]
            assert all((DEPLOY.parent / source).exists() for source in sources)
            assert set(sources) <= allowed
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 1000"]
    assert re.search(r"^RUN .*wget", "\n".join(lines), re.MULTILINE)  # KubeRay's probes need it
