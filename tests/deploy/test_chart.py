"""The Helm chart of deploy/kubernetes, and its kustomization: rendered by Helm and by kubectl, where these are.

Both are the manifests that tests/deploy/test_kubernetes.py looks at, so it is enough that they are the same.
"""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from copy import deepcopy
from typing import Any

import pytest
import yaml

import oobleck
from oobleck.cli.main import main
from oobleck.errors import ExitCode
from tests.kubernetes_manifests import ROOT, Manifest, jobset, kustomization, manifests

DIRECTORY = ROOT / "deploy" / "kubernetes"
KEYS = {"master": '{"master": 1}', "node": '{"node": 1}'}


def rendered(**values: Any) -> dict[tuple[str, str], Manifest]:
    """What Helm makes of the chart, by kind and name."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk, which has Helm itself, is not installed")
    with helm.Chart.load(str(DIRECTORY)) as chart:
        (text,) = chart.render(values=values, name="any").values()
    return by_name(yaml.safe_load_all(text))


def by_name(found: Any) -> dict[tuple[str, str], Manifest]:
    return {(each["kind"], each["metadata"]["name"]): each for each in found if each}


def with_image(found: Manifest) -> Manifest:
    """A manifest as the kustomization changes it."""
    changed = deepcopy(found)
    (image,) = kustomization()["images"]
    if changed["kind"] in ("StatefulSet", "Job"):
        for container in changed["spec"]["template"]["spec"]["containers"]:
            container["image"] = f"{image['newName']}:{image['newTag']}"
    return changed


def containers(found: dict[tuple[str, str], Manifest], kind: str) -> dict[str, Manifest]:
    """The containers of the nodes and of the master of a JobSet, or of a TrainingRuntime's."""
    spec = found[kind, "oobleck"]["spec"]
    jobs = (spec["template"]["spec"] if kind == "TrainingRuntime" else spec)["replicatedJobs"]
    return {job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0] for job in jobs}


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, str], Manifest]:
    return by_name(map(with_image, manifests()))


def test_helm_makes_the_manifests_themselves(expected: dict[tuple[str, str], Manifest]) -> None:
    found = rendered()
    settings = found.pop(("ConfigMap", "oobleck-job"))
    assert settings["data"] == {"job.yaml": (DIRECTORY / "job.yaml").read_text(encoding="utf-8")}
    assert found == expected


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_kubectl_makes_the_manifests_themselves(expected: dict[tuple[str, str], Manifest], tmp_path: Any) -> None:
    shutil.copytree(DIRECTORY, tmp_path / "run")
    (tmp_path / "run" / "keys").mkdir()
    for name, text in KEYS.items():
        (tmp_path / "run" / "keys" / f"{name}.json").write_text(text, encoding="utf-8")
    command = ["kubectl", "kustomize", str(tmp_path / "run")]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = by_name(yaml.safe_load_all(text))
    made = {("ConfigMap", "oobleck-job"), ("Secret", "oobleck-master-keys"), ("Secret", "oobleck-node-keys")}
    assert found.keys() - expected.keys() == made
    assert found["Secret", "oobleck-node-keys"]["data"].keys() == {"node.json"}
    assert {name: each for name, each in found.items() if name not in made} == expected


def test_values_reach_all_places() -> None:
    resources = {"limits": {"nvidia.com/gpu": 8}}
    found = rendered(
        image="mine:1", nodes=7, slots=8, resources=resources, sharedMemory="1Ti", nodeSelector={"zone": "a"},
        job="tag: x\n", keys=KEYS, arguments=["--save-every", "10m"],
    )  # fmt: skip
    nodes, master = found["StatefulSet", "oobleck-node"]["spec"], found["Job", "oobleck-master"]["spec"]["template"]
    assert nodes["replicas"] == 7
    assert nodes["template"]["spec"]["nodeSelector"] == {"zone": "a"}
    assert "nodeSelector" not in master["spec"]
    (node,), (leader,) = nodes["template"]["spec"]["containers"], master["spec"]["containers"]
    assert (node["image"], leader["image"]) == ("mine:1", "mine:1")
    assert "$(POD_NAME) slots=8 address=$(POD_IP)" in node["command"]
    assert node["resources"]["limits"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 8}
    words = leader["command"]
    assert words[words.index("--nodes") + 1] == "7"
    assert words[-2:] == ["--save-every", "10m"]
    assert leader["resources"]["limits"]["memory"] == "2Gi"
    (memory,) = [each for each in nodes["template"]["spec"]["volumes"] if each["name"] == "memory"]
    assert memory["emptyDir"]["sizeLimit"] == "1Ti"
    assert found["ConfigMap", "oobleck-job"]["data"] == {"job.yaml": "tag: x\n"}
    secrets = {name: found["Secret", f"oobleck-{name}-keys"]["data"] for name in ("master", "node")}
    encoded = {f"{name}.json": base64.b64encode(text.encode()).decode() for name, text in KEYS.items()}
    assert secrets == {"master": encoded, "node": {"node.json": encoded["node.json"]}}


def test_a_jobset_is_that_of_the_file_and_queued_where_it_is_asked_for() -> None:
    found = rendered(**{"as": "jobset"}, image="oobleck", queue="team")
    assert ("StatefulSet", "oobleck-node") not in found
    made = found["JobSet", "oobleck"]
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert {job["name"]: job for job in made["spec"]["replicatedJobs"]} == jobset()
    more = rendered(**{"as": "jobset"}, nodes=7)["JobSet", "oobleck"]["spec"]["replicatedJobs"]
    (node,) = [job["template"]["spec"] for job in more if job["name"] == "node"]
    assert (node["parallelism"], node["completions"]) == (7, 7)


def test_a_runtime_of_kubeflows_trainer_is_the_jobset_with_the_label_by_which_the_trainer_finds_the_nodes() -> None:
    found = rendered(**{"as": "trainer"}, image="oobleck")
    runtime = found["TrainingRuntime", "oobleck"]
    assert runtime["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 4}
    jobs = {job["name"]: job for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    labels = jobs["node"]["template"].pop("metadata")["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert jobs == jobset()
    assert containers(found, "TrainingRuntime")["node"]["name"] == "node", "as the trainer's webhook demands"


def test_another_form_is_refused_by_name() -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk, which has Helm itself, is not installed")
    with pytest.raises(helm.HelmError, match="as: pod is none of statefulset, jobset, trainer"):
        rendered(**{"as": "pod"})


def test_the_chart_names_options_that_the_command_has(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DIRECTORY / "values.yaml").read_text(encoding="utf-8")
    named = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--set-file"}  # Helm's own
    assert main(["up", "--help"]) == ExitCode.DONE
    assert named
    assert named <= set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))


def test_the_chart_has_the_version_and_the_image_of_the_package() -> None:
    chart = yaml.safe_load((DIRECTORY / "Chart.yaml").read_text(encoding="utf-8"))
    values = yaml.safe_load((DIRECTORY / "values.yaml").read_text(encoding="utf-8"))
    (image,) = kustomization()["images"]
    assert (chart["version"], chart["appVersion"]) == (oobleck.__version__, oobleck.__version__)
    assert values["image"] == f"{image['newName']}:{image['newTag']}"
