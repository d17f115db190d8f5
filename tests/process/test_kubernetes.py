"""compose/kubernetes: what kustomize makes of it, against Kubernetes' own schemas and what we promise. No cluster."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from appliance.gateway.clients.auth import OPEN_PATHS
from images.build import router
from images.pins import lock
from tests.process.stages.kustomize import Resource, build, identity, pod_specs

ROOT = Path(__file__).parents[2]
HERE = ROOT / "compose/kubernetes"
CRDS = ROOT / "tests/data/crds"
OVERLAYS = ("cpu", "gpu", "gpus", "replicas", "multi-host")
COMPONENTS = ("monitoring", "inference-pool")
# The oldest that is still looked after in the year of writing, and the newest whose schemas are here.
VERSIONS = ("1.34", "1.37")
RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
SELECTED = {"app.kubernetes.io/name", "app.kubernetes.io/component", "role"}


@cache
def made(overlay: str) -> tuple[Resource, ...]:
    return tuple(build(HERE / "overlays" / overlay))


@cache
def all_of(overlay: str) -> tuple[Resource, ...]:
    return tuple(build(HERE / "overlays" / overlay, *(HERE / "components" / name for name in COMPONENTS)))


def pods(overlay: str) -> list[tuple[dict[str, str], dict[str, Any]]]:
    return [each for resource in all_of(overlay) for each in pod_specs(resource)]


def of_kind(overlay: str, kind: str) -> list[Resource]:
    return [each for each in all_of(overlay) if each["kind"] == kind]


def sorted_by_identity(found: list[Resource]) -> list[Resource]:
    return sorted(found, key=identity)


def kubectl(folder: Path) -> list[Resource]:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


# What it is made into


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here, whose kustomize this is held to")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_makes_the_same(overlay: str, tmp_path: Path) -> None:
    assert sorted_by_identity(list(made(overlay))) == sorted_by_identity(kubectl(HERE / "overlays" / overlay))
    shutil.copytree(HERE, tmp_path / "kubernetes")
    folder = tmp_path / "kubernetes/with-components"
    folder.mkdir()
    components = [f"../components/{name}" for name in COMPONENTS]
    told = {"resources": [f"../overlays/{overlay}"], "components": components}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(told))
    assert sorted_by_identity(list(all_of(overlay))) == sorted_by_identity(kubectl(folder))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_knows_every_field(overlay: str, version: str) -> None:
    own = [each for each in all_of(overlay) if not is_foreign(each)]
    assert len(own) >= 5
    for resource in own:
        kubernetes_validate.validate(resource, version, strict=True)


def is_foreign(resource: Resource) -> bool:
    """True if tests/data/crds has a definition of the resource's group."""
    group = resource["apiVersion"].partition("/")[0]
    return any(name.startswith(f"{group}_") for name in definitions())


@cache
def definitions() -> dict[str, dict[str, Any]]:
    """Return the definition in each file of tests/data/crds, after a check of the SHA-256 that sources.yaml has for
    it."""
    found = {}
    for name, row in yaml.safe_load((CRDS / "sources.yaml").read_text()).items():
        text = gzip.decompress((CRDS / f"{name}.gz").read_bytes())
        assert hashlib.sha256(text).hexdigest() == row["sha256"], name
        found[name] = yaml.load(text, Loader=yaml.CSafeLoader)
    return found


@cache
def schema_of(api_version: str, kind: str) -> dict[str, Any]:
    group, _, version = api_version.partition("/")
    (found,) = [
        each["schema"]["openAPIV3Schema"]
        for definition in definitions().values()
        if (definition["spec"]["group"], definition["spec"]["names"]["kind"]) == (group, kind)
        for each in definition["spec"]["versions"]
        if each["name"] == version and each["served"]
    ]
    strict: dict[str, Any] = json.loads(json.dumps(found), object_hook=without_unknown_fields)
    strict["properties"]["metadata"] = {"type": "object"}
    return strict


def without_unknown_fields(schema: dict[str, Any]) -> dict[str, Any]:
    """The API server drops in silence what the schema does not name. Numbers with a unit are strings or numbers."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        return schema | {"additionalProperties": bool(schema.get("x-kubernetes-preserve-unknown-fields"))}
    return schema


@pytest.mark.parametrize(
    ("overlay", "kind"), [("cpu", "ServiceMonitor"), ("cpu", "InferencePool"), ("multi-host", "LeaderWorkerSet")]
)
def test_other_kinds_are_as_their_definitions_have_them(overlay: str, kind: str) -> None:
    (resource,) = of_kind(overlay, kind)
    schema = schema_of(resource["apiVersion"], kind)
    assert [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(resource)] == []
    wrong = resource | {"spec": {**resource["spec"], "replica": 1}}
    assert not jsonschema.Draft202012Validator(schema).is_valid(wrong)


def test_every_foreign_kind_was_looked_at() -> None:
    kinds = {each["kind"] for overlay in OVERLAYS for each in all_of(overlay) if is_foreign(each)}
    assert kinds == {"ServiceMonitor", "InferencePool", "LeaderWorkerSet"}


# What is promised


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_as_restricted_as_its_namespace_asks(overlay: str) -> None:
    (namespace,) = of_kind(overlay, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert pods(overlay)
    for _, spec in pods(overlay):
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        for container in spec["containers"]:
            assert container["securityContext"] == RESTRICTED
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_liveness_never_depends_on_the_model_and_probes_need_no_key(overlay: str) -> None:
    for labels, spec in pods(overlay):
        (container,) = spec["containers"]
        live, ready, start = (container[f"{name}Probe"] for name in ("liveness", "readiness", "startup"))
        if labels["app.kubernetes.io/component"] == "router":
            assert (live["httpGet"]["path"], ready["httpGet"]["path"]) == ("/liveness", "/readiness")
            continue
        assert live["httpGet"]["path"] == start["httpGet"]["path"] == "/health/live"
        assert ready["httpGet"]["path"] == "/health/ready"
        assert {"/health/live", "/health/ready"} <= set(OPEN_PATHS)
        assert start["periodSeconds"] * start["failureThreshold"] >= 300
        drain_s = next(int(each["value"]) for each in container["env"] if each["name"] == "APPLIANCE_DRAIN_S")
        assert spec["terminationGracePeriodSeconds"] >= drain_s + 15


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_pods_and_ports_are_theirs(overlay: str) -> None:
    found = pods(overlay)
    for selector, ports in selections(overlay):
        assert selector.keys() <= SELECTED
        chosen = [spec for labels, spec in found if selector.items() <= labels.items()]
        assert chosen, selector
        for spec in chosen:
            (port,) = spec["containers"][0]["ports"]
            assert ports <= {port["name"], port["containerPort"]}, selector


def selections(overlay: str) -> Iterator[tuple[dict[str, str], set[Any]]]:
    for resource in all_of(overlay):
        spec = resource.get("spec", {})
        match resource["kind"]:
            case "Service":
                yield spec["selector"], {port["targetPort"] for port in spec["ports"]}
            case "NetworkPolicy":
                rules = (rule for rule in spec["ingress"])
                yield (
                    spec["podSelector"]["matchLabels"],
                    {port["port"] for rule in rules for port in rule.get("ports", ())},
                )
            case "PodDisruptionBudget":
                yield spec["selector"]["matchLabels"], set()
            case "InferencePool":
                yield spec["selector"]["matchLabels"], {port["number"] for port in spec["targetPorts"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_behind_a_policy_in_both_directions(overlay: str) -> None:
    for labels, _ in pods(overlay):
        policies = [
            set(each["spec"]["policyTypes"])
            for each in of_kind(overlay, "NetworkPolicy")
            if each["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        ]
        assert set().union(*policies) == {"Ingress", "Egress"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_key_is_a_file_of_a_secret_and_metrics_are_asked_for_with_it(overlay: str) -> None:
    for labels, spec in pods(overlay):
        (container,) = spec["containers"]
        assert not [each for each in container.get("env", ()) if "KEY" in each["name"] or "TOKEN" in each["name"]]
        if labels["app.kubernetes.io/component"] == "router":
            continue
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "key"]
        assert (mount["mountPath"], mount["subPath"], mount["readOnly"]) == ("/data/secrets/api_key", "api_key", True)
        (volume,) = [each for each in spec["volumes"] if each["name"] == "key"]
        assert volume["secret"]["secretName"] == "appliance-key"
        assert not volume["secret"]["defaultMode"] & 0o007
    (monitor,) = of_kind(overlay, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "appliance-key", "key": "api_key"}


def test_the_router_knows_each_replica_and_is_the_locked_one() -> None:
    (replicas,) = of_kind("replicas", "StatefulSet")
    (deployment,) = of_kind("replicas", "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    count, service = replicas["spec"]["replicas"], replicas["spec"]["serviceName"]
    assert service in {each["metadata"]["name"] for each in of_kind("replicas", "Service")}
    urls = [word for word in container["args"] if word.startswith("http://")]
    assert urls == [f"http://appliance-{number}.{service}.appliance.svc:11435" for number in range(count)]
    assert container["image"] == f"{router.NAME}:{router.version_of((ROOT / router.LOCK).read_text())}"
    assert f"{router.PROGRAM}=={container['image'].partition(':')[2]}" in lock.parse_pins(
        (ROOT / router.LOCK).read_text()
    )
    (budget,) = of_kind("replicas", "PodDisruptionBudget")
    assert {key: value for key, value in budget["spec"].items() if key != "selector"} == {"minAvailable": 1}


def test_the_router_has_the_flags_that_were_tried_in_containers() -> None:
    text = (ROOT / "compose/replicas.yaml").read_text().replace("${ROUTER_REQUEST_TIMEOUT_S:-86400}", "86400")
    text = text.replace("${ROUTER_STARTUP_TIMEOUT_S:-86400}", "86400")
    (deployment,) = of_kind("replicas", "Deployment")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert all(f"      - {word}\n" in text for word in args if word.startswith("--"))


def test_gpus_are_asked_for_where_they_are_needed() -> None:
    def gpus(overlay: str) -> list[str | None]:
        return [spec["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for _, spec in pods(overlay)]

    assert gpus("cpu") == [None]
    assert gpus("gpu") == ["1"]
    assert gpus("gpus") == ["4"]
    assert gpus("multi-host") == ["8", "8"]
    ids = {path.name for path in (ROOT / "images/rendered").iterdir()}
    for overlay in OVERLAYS:
        for _, spec in pods(overlay):
            name, _, tag = spec["containers"][0]["image"].partition(":")
            assert name == router.NAME or tag in ids
    for overlay in ("gpus", "multi-host"):
        for _, spec in pods(overlay):
            assert "/dev/shm" in [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]]


def test_a_group_of_hosts_falls_together_and_reads_the_same_files() -> None:
    (group,) = of_kind("multi-host", "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    # The leader is ready only with its followers: with LeaderReady none would ever be made.
    assert group["spec"]["startupPolicy"] == "LeaderCreated"
    secrets = {
        volume["secret"]["secretName"]
        for _, spec in pods("multi-host")
        for volume in spec["volumes"]
        if "secret" in volume
    }
    assert len(secrets) == 1  # followers join with the leader's key
    given = {row["name"] for _, spec in pods("multi-host") for row in spec["containers"][0]["env"]}
    assert given == {"APPLIANCE_DRAIN_S"}  # the place of a pod is the controller's to say
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for _, spec in pods("multi-host")
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    (claim,) = of_kind("multi-host", "PersistentVolumeClaim")
    assert claims == {claim["metadata"]["name"]}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (leader, _), (worker, _) = pods("multi-host")
    (service,) = of_kind("multi-host", "Service")
    assert service["spec"]["selector"].items() <= leader.items()
    assert not service["spec"]["selector"].items() <= worker.items()
