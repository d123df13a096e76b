"""The table of docs/sizing.md is what tools/sizing.py makes, and its command is what `oobleck plan` says."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oobleck.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sizing", ROOT / "tools" / "sizing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sizing = load()


def table() -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+B \|", line)]


def shape_of(name: str) -> Any:
    return sizing.shape_from_config({"model_type": "llama", **sizing.MODELS[name]})


def test_each_model_has_a_row_for_each_device() -> None:
    assert [(row[0], row[1]) for row in table()] == [(name, each) for name in sizing.MODELS for each in sizing.DEVICES]


@pytest.mark.parametrize(
    "name", ["7B", *(pytest.param(each, marks=pytest.mark.slow) for each in ("13B", "34B", "70B"))]
)
def test_the_rows_are_what_the_planner_says(name: str) -> None:
    for row in (row for row in table() if row[0] == name):
        device, fewest = row[1], int(row[2])
        seconds = [sizing.step_s(shape_of(name), device, fewest, gigabits) for gigabits in sizing.GIGABITS]
        assert sizing.row_text(name, device, fewest, tuple(filter(None, seconds))) == f"| {' | '.join(row)} |"
        assert fewest == 1 or sizing.step_s(shape_of(name), device, fewest - 1, sizing.GIGABITS[0]) is None


def test_the_pages_command_says_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = PAGE.partition("```\noobleck ")[2].partition("```")[0].replace("\\\n", "")
    words = shlex.split(command)
    words[words.index("config.json")] = str(tmp_path / "config.json")
    words[words.index("--nodes") + 1] = "2"
    config = {"model_type": "llama", **sizing.MODELS["7B"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main([*words, "--json"]) == 0
    planned = json.loads(capfd.readouterr().out)
    assert planned["plan"]["redundant"]
    expected = sizing.step_s(shape_of("7B"), "H100", 2, int(planned["network"]["inter_node_bytes_per_s"] / 1.25e8))
    assert planned["plan"]["step_s"] == pytest.approx(expected, rel=1e-6)
