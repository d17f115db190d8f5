"""Merges as `kustomize build` does, as much of it as compose/kubernetes uses, and an error for all else.

PyPI's package of that name is another program, npm's a repackaged binary of 4.5.4, of 2022. So nothing that could be
pinned makes the output; where `kubectl` is installed, the tests hold this to `kubectl kustomize`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]
KNOWN = {"apiVersion", "kind", "resources", "components", "configMapGenerator", "images", "replicas", "patches"}
LISTS_BY = {"containers": "name", "volumes": "name", "volumeMounts": "mountPath", "env": "name"}
SCALED = ("Deployment", "StatefulSet")


def build(folder: Path, *components: Path) -> list[Resource]:
    """Return the resources of a folder. `components` are added to those that its kustomization names."""
    told = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert told.keys() <= KNOWN, told.keys() - KNOWN
    found = [each for name in told.get("resources", ()) for each in _resources(folder / name)]
    for component in (*(folder / name for name in told.get("components", ())), *components):
        found += build(component)
    found += [_config_map(folder, each) for each in told.get("configMapGenerator", ())]
    for patch in told.get("patches", ()):
        found = _patched(found, patch, folder)
    for image in told.get("images", ()):
        _set_image(found, image)
    for scale in told.get("replicas", ()):
        _one(found, lambda each, name=scale["name"]: each["kind"] in SCALED and each["metadata"]["name"] == name)[
            "spec"
        ]["replicas"] = scale["count"]
    return found


def identity(resource: Resource) -> tuple[str, str, str]:
    return resource["apiVersion"], resource["kind"], resource["metadata"]["name"]


def pod_specs(resource: Resource) -> Iterable[tuple[dict[str, str], dict[str, Any]]]:
    """Return labels and spec of each pod template of the resource."""
    templates = []
    if resource["kind"] in SCALED:
        templates = [resource["spec"]["template"]]
    if resource["kind"] == "LeaderWorkerSet":
        made = resource["spec"]["leaderWorkerTemplate"]
        templates = [made["leaderTemplate"], made["workerTemplate"]]
    return [(template["metadata"]["labels"], template["spec"]) for template in templates]


def _resources(path: Path) -> list[Resource]:
    return build(path) if path.is_dir() else [each for each in yaml.safe_load_all(path.read_text()) if each]


def _config_map(folder: Path, told: dict[str, Any]) -> Resource:
    options = told["options"]
    assert told.keys() == {"name", "namespace", "files", "options"}
    assert options.keys() == {"disableNameSuffixHash", "labels"}
    files = (each.split("=") for each in told["files"])
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": told["name"], "namespace": told["namespace"], "labels": options["labels"]},
        "data": {name: (folder / path).read_text() for name, path in files},
    }


def _one(found: list[Resource], is_it: Any) -> Resource:
    (resource,) = [each for each in found if is_it(each)]
    return resource


def _patched(found: list[Resource], patch: dict[str, Any], folder: Path) -> list[Resource]:
    if "path" in patch:
        (change,) = yaml.safe_load_all((folder / patch["path"]).read_text())
        target = _one(found, lambda each: identity(each) == identity(change))
        return [_merged(each, change) if each is target else each for each in found]
    wanted = patch["target"]
    target = _one(found, lambda each: (each["kind"], each["metadata"]["name"]) == (wanted["kind"], wanted["name"]))
    for step in yaml.safe_load(patch["patch"]):
        _apply(target, step)
    return found


def _merged(old: Any, new: Any, key: str = "") -> Any:
    """Return a strategic merge: maps by key, null removes, lists in LISTS_BY by name, other lists are replaced."""
    if isinstance(old, dict) and isinstance(new, dict):
        both = {name: _merged(old[name], new[name], name) if name in old else new[name] for name in new}
        return {name: value for name, value in (copy.deepcopy(old) | both).items() if value is not None}
    if not (isinstance(old, list) and isinstance(new, list) and key in LISTS_BY):
        return new
    by = LISTS_BY[key]
    changes = {each[by]: each for each in new}
    kept = [_merged(each, changes.pop(each[by])) if each[by] in changes else each for each in old]
    return [*changes.values(), *kept]


def _apply(target: Resource, step: dict[str, Any]) -> None:
    """A step of RFC 6902."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
    at: Any = target
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    assert step["op"] in ("add", "replace"), step
    if isinstance(at, list):
        assert (step["op"], last) == ("add", "-"), step
        at.append(step["value"])
    else:
        assert step["op"] == "add" or last in at, step
        at[last] = step["value"]


def _set_image(found: list[Resource], image: dict[str, str]) -> None:
    for resource in found:
        for _, spec in pod_specs(resource):
            for container in spec["containers"]:
                name, _, tag = container["image"].partition(":")
                if name == image["name"]:
                    container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
