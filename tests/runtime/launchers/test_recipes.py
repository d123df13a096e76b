"""The recipes of docs/hosts_from.md, with stand-ins for the tools that answer as those are documented to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oobleck.cli.inputs import parse_hostfile
from oobleck.errors import ConfigError
from oobleck.runtime.launchers import HostsCommand

PAGE = (Path(__file__).parents[3] / "docs" / "hosts_from.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^```sh\n# ([^\n]+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))

AWS = r"""
case "$*" in
    *Name=tag:job,Values=my-llama*Name=instance-state-name,Values=running*) printf '10.0.0.1\t10.0.0.2\n' ;;
    *) exit 254 ;;
esac
"""
GCLOUD = r"""
listed="--filter labels.job=my-llama AND status=RUNNING --format value(networkInterfaces[0].networkIP)"
case "$*" in
    "compute instances list $listed")
        printf '10.0.0.1\n10.0.0.2\n' ;;
    *) exit 2 ;;
esac
"""
SQUEUE = r"""
case "$*" in
    "--noheader --name NAME --states RUNNING --format %N") printf 'n[1-2]\nn7\n' ;;
    *) exit 1 ;;
esac
"""
SCONTROL = r"""
case "$*" in
    "show hostnames n[1-2]") printf 'n1\nn2\n' ;;
    "show hostnames n7") echo n7 ;;
    *) exit 1 ;;
esac
"""

ANSWERS = {
    "SkyPilot": ["10.0.0.1", "10.0.0.2"],
    "AWS": ["10.0.0.1", "10.0.0.2"],
    "Google Cloud": ["10.0.0.1", "10.0.0.2"],
    "Slurm": ["n1", "n2", "n7"],
}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, body in {"aws": AWS, "gcloud": GCLOUD, "squeue": SQUEUE, "scontrol": SCONTROL}.items():
        stand_in(tmp_path / name, body)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2")
    return tmp_path


def stand_in(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh{body}")
    path.chmod(0o700)


def test_each_recipe_has_its_answer_here() -> None:
    assert RECIPES.keys() == ANSWERS.keys()


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_recipe_prints_the_nodes(name: str, tools: Path) -> None:
    command = HostsCommand(command=RECIPES[name])
    assert [node.host for node in parse_hostfile(await command.read(), source=command.source)] == ANSWERS[name]


@pytest.mark.parametrize(("name", "tool"), [("Google Cloud", "gcloud"), ("Slurm", "squeue")])
async def test_a_tool_that_fails_is_a_command_that_fails(name: str, tool: str, tools: Path) -> None:
    stand_in(tools / tool, "\necho 'no credentials' >&2; exit 255\n")
    with pytest.raises(ConfigError, match="no credentials"):
        await HostsCommand(command=RECIPES[name]).read()


async def test_where_a_pipe_hides_that_a_tool_fails_no_node_is_named(tools: Path) -> None:
    """So nobody is drained: an answer without nodes is not followed."""
    stand_in(tools / "aws", "\nexit 255\n")
    assert parse_hostfile(await HostsCommand(command=RECIPES["AWS"]).read(), source="") == ()
