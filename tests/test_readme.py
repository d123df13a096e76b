"""What README.md states, held to the code: versions, what is supported, and the numbers that any machine computes."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from oobleck.cli.main import main
from oobleck.job import JobSpec
from oobleck.schedule import ScheduleKind

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SUPPORTED = " ".join(README.split("\nSupported today: ")[1].split("\n\n")[0].split())

SCHEDULES = {
    ScheduleKind.GPIPE: "GPipe",
    ScheduleKind.ONE_F_ONE_B: "1F1B",
    ScheduleKind.INTERLEAVED: "interleaved",
    ScheduleKind.ZERO_BUBBLE: "zero-bubble",
}
ROWS = {
    "oobleck": "**Oobleck**: the real coordinator and planner",
    "recycle": "ReCycle, modelled",
    "restart": "checkpoint and restart, modelled: every 10 minutes",
    "varuna": "Varuna, modelled: the same interval",
    "bamboo": "Bamboo, modelled",
}


def test_the_versions_of_python_are_those_that_can_be_installed_on() -> None:
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    first, last = re.findall(r"Python 3\.(\d+) to 3\.(\d+)", README)[0]
    assert allowed == f">=3.{first},<3.{int(last) + 1}"


def test_the_precisions_and_schedules_are_all_that_there_are() -> None:
    dtypes = get_args(get_type_hints(JobSpec)["dtype"])
    assert set(re.findall(r"b?float\d+", SUPPORTED)) == set(dtypes)
    (listed,) = re.findall(r"schedules\]\(docs/schedules.md\) \((.*?)\)", SUPPORTED)
    assert listed.split(", ") == [SCHEDULES[kind] for kind in ScheduleKind]
    assert "not run" not in SUPPORTED


def simulated(policies: tuple[str, ...], directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Run the commands of the front page for some of their policies; returns the cells of their rows."""
    (block,) = re.findall(r"```\n(oobleck trace generate --nodes 64 .*?\noobleck sim .*?)```", README, flags=re.DOTALL)
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    monkeypatch.chdir(directory)
    assert [command[0] for command in commands] == ["oobleck"] * 2
    assert main(commands[0][1:]) == 0
    words = commands[1][1:]
    words[words.index("--policy") + 1] = ",".join(policies)
    assert main([*words, "--summary", "summary.json"]) == 0
    summaries = json.loads(Path("summary.json").read_text())
    batch, week_s = 512, 7 * 86_400.0
    return {
        policy: [
            f"{summaries[policy]['steps_committed'] * batch / week_s:.1f}",
            f"{100 * summaries[policy]['goodput']:.{2 if policy == 'oobleck' else 1}f} %",
            f"{summaries[policy]['steps_lost']:,}",
        ]
        for policy in policies
    }


def row(policy: str) -> list[str]:
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {ROWS[policy]} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_simulators_table_has_what_its_commands_print_for_two_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = simulated(("recycle", "restart"), tmp_path, monkeypatch)
    assert found == {policy: row(policy) for policy in found}


@pytest.mark.slow
def test_the_simulators_table_has_what_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated(tuple(ROWS), tmp_path, monkeypatch) == {policy: row(policy) for policy in ROWS}
