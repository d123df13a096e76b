from __future__ import annotations

import re
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.sim.costs.costs import RecoveryCosts
from oobleck.sim.policies.registry import POLICIES
from oobleck.sim.trace import event_types, trace_from_json
from oobleck.sim.trace.convert import FORMATS
from oobleck.sim.trace.generate import PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()


def test_the_trace_of_the_page_is_read_as_it_stands() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(trace_from_json(text).events) == 3


def test_every_kind_preset_format_and_policy_is_on_the_page() -> None:
    for name in (*event_types(), *PRESETS, *POLICIES):
        assert f"`{name}`" in PAGE, name
    for name in FORMATS:
        assert name in PAGE.lower(), name


def test_the_costs_of_the_page_are_the_defaults() -> None:
    costs = RecoveryCosts()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([0-9.]+)[^|]* \|", PAGE, flags=re.MULTILINE))
    assert float(rows["detecting a closed connection"]) == costs.detect_s
    assert float(rows["detecting a silent node"]) == costs.lease_s
    assert float(rows["fencing all survivors"]) == costs.fence_s
    assert float(rows["deciding"]) == costs.decide_s
    assert float(rows["forming groups"]) == costs.regroup_s
    assert float(rows["starting the workers of a new node"]) == costs.node_start_s
    assert float(rows["restarting a worker"]) == costs.worker_start_s
    assert float(rows["reading a checkpoint, when all copies of a layer are lost"]) == costs.checkpoint_read_s


def test_the_options_that_the_page_names_exist(capsys: pytest.CaptureFixture[str]) -> None:
    offered = set()
    for command in (["sim"], ["trace", "generate"], ["trace", "convert"], ["trace", "info"]):
        assert main([*command, "--help"]) == 0
        offered |= set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", PAGE)) <= offered
