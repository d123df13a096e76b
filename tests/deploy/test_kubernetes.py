"""The manifests of deploy/kubernetes: valid for the supported versions, and in agreement with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import oobleck
from oobleck.cli.inputs import NodeOptions, load_job, read_source
from oobleck.cli.main import main
from oobleck.errors import ExitCode
from oobleck.runtime.launchers import make_key_files, read_keys, read_pass
from oobleck.runtime.metrics_output import parse_metrics_address
from tests.kubernetes_manifests import (
    ROOT,
    VARIABLES,
    Manifest,
    command_of,
    container_of,
    jobset,
    kustomization,
    manifest,
    manifests,
    volumes_of,
)

SUPPORTED = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")


@pytest.mark.parametrize("version", SUPPORTED)
def test_the_manifests_are_valid(version: str) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: its schemas take 140 MB"
    )
    jobs = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, **job["template"]} for job in jobset().values()]
    for each in [*manifests(), *jobs]:
        kubernetes_validate.validate(each, version, strict=True)


def ports_of_master() -> dict[str, Manifest]:
    return {port["name"]: port for port in container_of("Job")["ports"]}


def test_the_kustomization_names_all_that_is_there() -> None:
    base = kustomization()
    others = {"kustomization.yaml", "jobset.yaml", ".helmignore", "Chart.yaml", "values.yaml", "templates"}
    there = {path.name for path in (ROOT / "deploy" / "kubernetes").iterdir()} - others
    assert {*base["resources"], "job.yaml"} == there
    assert base["generatorOptions"] == {"disableNameSuffixHash": True}, "the manifests name what is generated"


def test_all_names_that_are_used_are_of_something() -> None:
    named = {(each["kind"], each["metadata"]["name"]) for each in manifests()}
    base = kustomization()
    named |= {("Secret", each["name"]) for each in base["secretGenerator"]}
    named |= {("ConfigMap", each["name"]) for each in base["configMapGenerator"]}
    for kind in ("StatefulSet", "Job"):
        for volume in volumes_of(kind):
            if (claim := volume.get("persistentVolumeClaim")) is not None:
                assert ("PersistentVolumeClaim", claim["claimName"]) in named
            if (secret := volume.get("secret")) is not None:
                assert ("Secret", secret["secretName"]) in named
            if (settings := volume.get("configMap")) is not None:
                assert ("ConfigMap", settings["name"]) in named
    assert ("ServiceAccount", manifest("Job")["spec"]["template"]["spec"]["serviceAccountName"]) in named
    assert ("Service", manifest("StatefulSet")["spec"]["serviceName"]) in named
    binding = manifest("RoleBinding")
    for each in (binding["roleRef"], *binding["subjects"]):
        assert (each["kind"], each["name"]) in named
    images = {container_of(kind)["image"] for kind in ("StatefulSet", "Job")}
    assert images == {each["name"] for each in base["images"]}


def test_nodes_dial_in_where_the_master_listens() -> None:
    node, master = command_of("StatefulSet"), command_of("Job")
    host, port = node[node.index("--master") + 1].split(":")
    service = manifest("Service", host)
    (served,) = service["spec"]["ports"]
    listened = ports_of_master()["dial-in"]
    assert str(served["port"]) == port
    assert (served["targetPort"], str(listened["containerPort"])) == (listened["name"], port)
    assert master[master.index("--dial-in") + 1] == port
    labels = manifest("Job")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_the_master_follows_the_pods_of_the_nodes_and_begins_with_as_many_as_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"HOST": "10.0.0.1", "PORT": "443"}.items():
        monkeypatch.setenv(f"KUBERNETES_SERVICE_{name}", value)
    monkeypatch.setenv("OOBLECK_SERVICE_ACCOUNT", str(tmp_path))
    (tmp_path / "namespace").write_text("training")
    words, nodes = command_of("Job"), manifest("StatefulSet")["spec"]
    given = {name: words[words.index(name) + 1] for name in ("--kubernetes", "--nodes", "--dial-in")}
    make_key_files(tmp_path / "keys", master="oobleck-master:7077")
    source = read_source(
        None,
        NodeOptions(
            kubernetes=given["--kubernetes"],
            num_nodes=int(given["--nodes"]),
            dial_in=given["--dial-in"],
            keys=tmp_path / "keys",
        ),
    )
    assert len(source.names) == nodes["replicas"]
    labels = dict(label.split("=") for label in given["--kubernetes"].split(","))
    assert labels == nodes["selector"]["matchLabels"] == nodes["template"]["metadata"]["labels"]
    others = manifest("Job")["spec"]["template"]["metadata"]["labels"]
    assert not labels.items() <= others.items(), "the master is none of its nodes"


def test_the_secrets_are_what_the_command_makes_and_nodes_have_no_more_than_they_need(tmp_path: Path) -> None:
    assert main(["keys", str(tmp_path / "keys"), "--master", "oobleck-master:7077"]) == ExitCode.DONE
    made = {f"keys/{path.name}" for path in (tmp_path / "keys").iterdir()}
    secrets = {each["name"]: set(each["files"]) for each in kustomization()["secretGenerator"]}
    mounted = {
        kind: {volume["secret"]["secretName"] for volume in volumes_of(kind) if "secret" in volume}
        for kind in ("StatefulSet", "Job")
    }
    assert {kind: set.union(*(secrets[name] for name in names)) for kind, names in mounted.items()} == {
        "StatefulSet": {"keys/node.json"},
        "Job": made,
    }
    assert read_keys(tmp_path / "keys")[1].name == "node.json"
    assert read_pass(tmp_path / "keys" / "node.json").master == command_of("StatefulSet")[-1]
    assert main(["keys", str(tmp_path / "keys"), "--master", "a:1"]) == ExitCode.CONFIG, "keys in use are not replaced"


def test_files_that_commands_name_are_mounted() -> None:
    for kind in ("StatefulSet", "Job"):
        places = [mount["mountPath"] for mount in container_of(kind)["volumeMounts"]]
        named = [word for word in command_of(kind) if word.startswith("/")]
        assert named
        assert [word for word in named if not any(f"{word}/".startswith(f"{place}/") for place in places)] == []
        volumes = {volume["name"] for volume in volumes_of(kind)}
        claims = manifest("StatefulSet")["spec"]["volumeClaimTemplates"] if kind == "StatefulSet" else []
        assert {mount["name"] for mount in container_of(kind)["volumeMounts"]} == volumes | {
            claim["metadata"]["name"] for claim in claims
        }


def test_the_rights_are_those_that_the_code_uses() -> None:
    """GET of pods with watch=1, and nothing else; nodes get no token."""
    assert manifest("Role")["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["watch"]}]
    assert manifest("StatefulSet")["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    for kind in ("StatefulSet", "Job"):
        spec = manifest(kind)["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert container_of(kind)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_only_nodes_reach_nodes_and_the_master_whose_metrics_prometheus_reads() -> None:
    pods = {kind: manifest(kind)["spec"]["template"]["metadata"]["labels"] for kind in ("StatefulSet", "Job")}
    policies = [each["spec"] for each in manifests() if each["kind"] == "NetworkPolicy"]
    by_kind = {
        kind: [each for each in policies if each["podSelector"]["matchLabels"].items() <= labels.items()]
        for kind, labels in pods.items()
    }
    nodes = {"from": [{"podSelector": {"matchLabels": pods["StatefulSet"]}}]}
    assert [each["ingress"] for each in by_kind["StatefulSet"]] == [[nodes]]
    ((for_nodes, for_prometheus),) = [each["ingress"] for each in by_kind["Job"]]
    assert for_nodes == {**nodes, "ports": [{"protocol": "TCP", "port": "dial-in"}]}
    assert for_prometheus["ports"] == [{"protocol": "TCP", "port": "metrics"}]
    assert ports_of_master().keys() == {"dial-in", "metrics"}
    assert all(each["policyTypes"] == ["Ingress"] for each in policies)


def test_a_prometheus_scrapes_the_master_where_it_serves_its_metrics() -> None:
    words, listened = command_of("Job"), ports_of_master()["metrics"]
    served = parse_metrics_address(words[words.index("--metrics") + 1])
    assert (served.host, served.port) == ("0.0.0.0", listened["containerPort"])
    monitor = yaml.safe_load((ROOT / "deploy" / "prometheus" / "podmonitor.yaml").read_text(encoding="utf-8"))
    labels = manifest("Job")["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == [listened["name"]]


def test_containers_write_to_volumes_alone_and_each_resource_has_a_limit() -> None:
    for kind in ("StatefulSet", "Job"):
        container = container_of(kind)
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert set(container["resources"]["limits"]) >= {"cpu", "memory"}
        written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert written >= {"/home/oobleck", "/home/oobleck/.oobleck", "/tmp"}
        assert all("sizeLimit" in volume["emptyDir"] for volume in volumes_of(kind) if "emptyDir" in volume)


def test_the_image_has_the_tag_of_this_version_and_never_a_moving_one() -> None:
    (image,) = kustomization()["images"]
    assert image["newTag"] == oobleck.__version__
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert f"image={image['newName']}:{image['newTag']}\n" in page


def test_variables_are_set_before_they_are_used() -> None:
    """Kubernetes replaces $(NAME) by variables that stand before, and leaves others as they are."""
    known: set[str] = set()
    for each in container_of("StatefulSet")["env"]:
        assert set(VARIABLES.findall(each.get("value", ""))) <= known
        known.add(each["name"])
    assert {name for word in command_of("StatefulSet") for name in VARIABLES.findall(word)} <= known


def test_exit_codes_end_or_repeat_the_job_as_they_mean() -> None:
    rules = manifest("Job")["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())}
    assert by_code == {ExitCode.USAGE: "FailJob", ExitCode.CONFIG: "FailJob", ExitCode.RESUMABLE: "Ignore"}
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {
        container_of("Job")["name"]
    }


def test_the_job_of_the_base_can_be_read() -> None:
    text = (ROOT / "deploy" / "kubernetes" / "job.yaml").read_text(encoding="utf-8")
    job = load_job(text, source="job.yaml")
    (settings,) = kustomization()["configMapGenerator"]
    words = command_of("Job")
    assert Path(words[words.index("--job") + 1]).name in settings["files"]
    assert yaml.safe_load(text)["tag"] == job.tag


def test_the_image_is_made_of_files_that_are_there_by_a_user_that_the_pods_have() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.*)$", text, flags=re.MULTILINE) for word in line.split()[:-1]]
    assert copied
    assert "'.[gpu,kubernetes]'" in text, "nodes read their GPUs, and the master asks the API server"
    assert [name for name in copied if not (ROOT / name).exists()] == []
    user = re.search(r"^USER (\d+):(\d+)$", text, flags=re.MULTILINE)
    assert user is not None
    home = re.search(r"^WORKDIR (/home/\S+)$", text, flags=re.MULTILINE)
    assert home is not None
    for kind in ("StatefulSet", "Job"):
        context: dict[str, Any] = manifest(kind)["spec"]["template"]["spec"]["securityContext"]
        assert (str(context["runAsUser"]), str(context["runAsGroup"])) == user.groups()
        places = {mount["mountPath"] for mount in container_of(kind)["volumeMounts"]}
        assert f"{home[1]}/.oobleck" in places, "runs keep their files below the home directory"
    python = re.search(r"^FROM python:(\d+\.\d+)", text, flags=re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert python is not None
    assert SpecifierSet(project["requires-python"]).contains(python[1])


def test_the_jobset_is_the_same_run() -> None:
    master, node = (jobset()[name]["template"]["spec"] for name in ("master", "node"))
    assert master == manifest("Job")["spec"]
    pods = manifest("StatefulSet")["spec"]
    assert node["parallelism"] == node["completions"] == pods["replicas"]
    ours, theirs = node["template"], pods["template"]
    assert ours["metadata"] == theirs["metadata"]
    assert {**ours["spec"], "containers": []} == {**theirs["spec"], "containers": [], "restartPolicy": "OnFailure"}
    (ours,), (theirs,) = ours["spec"]["containers"], theirs["spec"]["containers"]
    on_disk = [mount for mount in theirs["volumeMounts"] if mount["name"] == "state"]
    assert [*ours["volumeMounts"], *on_disk] == sorted(theirs["volumeMounts"], key=on_disk.__contains__)
    assert [each for each in ours["env"] if each["name"] not in ("INDEX", "POD_NAME")] == [
        each for each in theirs["env"] if each["name"] != "POD_NAME"
    ]
    assert [each["name"] for each in ours["env"][:2]] == ["INDEX", "POD_NAME"], "variables are set before they are used"
    left = {"env": [], "volumeMounts": []}
    assert {**ours, **left} == {**theirs, **left}
