"""deploy/clouds: files that the clouds' own tools read, and commands that Oobleck reads."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from oobleck.cli.inputs import parse_hostfile
from oobleck.cli.main import main
from tests.deploy.test_chart import rendered

ROOT = Path(__file__).parents[2]
CLOUDS = ROOT / "deploy" / "clouds"


def said(directory: Path, script: str, **variables: str) -> list[str]:
    """The words that a script gives to `oobleck`, which a program of this name in PATH tells."""
    (directory / "oobleck").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    (directory / "oobleck").chmod(0o755)
    environment = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", **variables}
    command = ["/bin/bash", "-ec", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_skypilot_task_trains_on_all_of_its_nodes_from_the_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = yaml.safe_load((CLOUDS / "skypilot.yaml").read_text(encoding="utf-8"))
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    assert said(tmp_path, task["run"], SKYPILOT_NODE_RANK="1", **variables) == []
    words = said(tmp_path, task["run"], SKYPILOT_NODE_RANK="0", **variables)
    assert [*words[:2], *words[3:]] == ["up", "--hosts-from", "--job", f"{Path.home()}/job.yaml", "--plain"]
    hosts = subprocess.check_output(["/bin/sh", "-c", words[2]], env={**os.environ, **variables}, text=True)
    nodes = [(node.host, node.num_devices) for node in parse_hostfile(hosts, source="the task")]
    assert nodes == [("10.0.0.1", 8), ("10.0.0.2", 8)]
    extras = re.findall(r"\[([\w,]+)\]", task["setup"])[0].split(",")
    assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8") for extra in extras)
    assert main([*words, "--not-an-option"]) == 2
    assert "--not-an-option" in capfd.readouterr().err, "the other words are options of `up`"


def test_parallelcluster_takes_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pytest.importorskip("pcluster.schemas.cluster_schema", reason="aws-parallelcluster is not installed")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    text = (CLOUDS / "parallelcluster.yaml").read_text(encoding="utf-8")
    loaded = schema.ClusterSchema(cluster_name="training").load(yaml.safe_load(text))
    assert loaded.scheduling.queues[0].capacity_type.value == "SPOT"


def test_the_command_for_hyperpod_keeps_pods_on_nodes_that_its_agent_passes() -> None:
    page = (ROOT / "docs" / "clouds.md").read_text(encoding="utf-8")
    words = shlex.split(page.partition("```\nhelm ")[2].partition("```")[0].replace("\\\n", ""))
    name, _, value = words[words.index("--set-json") + 1].partition("=")
    nodes = rendered(**{name: yaml.safe_load(value)})["StatefulSet", "oobleck-node"]["spec"]["template"]["spec"]
    assert nodes["nodeSelector"] == {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}
