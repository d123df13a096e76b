"""What deploy/kubernetes says, for tests that check it and that run its commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
_BASE = ROOT / "deploy" / "kubernetes"
VARIABLES = re.compile(r"\$\((\w+)\)")

Manifest = dict[str, Any]


def kustomization() -> Manifest:
    loaded: Manifest = yaml.safe_load((_BASE / "kustomization.yaml").read_text(encoding="utf-8"))
    return loaded


def manifests() -> list[Manifest]:
    """All resources that the kustomization names."""
    texts = [(_BASE / name).read_text(encoding="utf-8") for name in kustomization()["resources"]]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def jobset() -> dict[str, Manifest]:
    """The jobs of jobset.yaml by name."""
    *_, found = yaml.safe_load_all((_BASE / "jobset.yaml").read_text(encoding="utf-8"))
    return {job["name"]: job for job in found["spec"]["replicatedJobs"]}


def manifest(kind: str, name: str | None = None) -> Manifest:
    """The one of a kind, or the one of a name."""
    (found,) = [each for each in manifests() if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


def container_of(kind: str) -> Manifest:
    (container,) = manifest(kind)["spec"]["template"]["spec"]["containers"]
    found: Manifest = container
    return found


def volumes_of(kind: str) -> list[Manifest]:
    found: list[Manifest] = manifest(kind)["spec"]["template"]["spec"]["volumes"]
    return found


def command_of(kind: str, **variables: str) -> list[str]:
    """A container's command, with the variables that are given in place of $(NAME)."""
    words = container_of(kind)["command"]
    return [VARIABLES.sub(lambda found: variables.get(found[1], found[0]), word) for word in words]


def environment_of(kind: str, **fields: str) -> dict[str, str]:
    """A container's variables, with the pod's own fields by the names of the variables that have them."""
    found: dict[str, str] = {}
    for each in container_of(kind).get("env", ()):
        value = fields[each["name"]] if "valueFrom" in each else each["value"]
        found[each["name"]] = VARIABLES.sub(lambda name: found.get(name[1], name[0]), value)
    return found
