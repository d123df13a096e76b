from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.sim.costs.model import Costs
from oobleck.sim.policies.registry import POLICIES
from oobleck.sim.trace import trace_from_json
from oobleck.sim.trace.convert import FORMATS
from oobleck.sim.trace.events import event_types
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
    costs = Costs()
    rows = dict(re.findall(r"^\| `(\w+_\w+)` \| ([0-9.e-]+)(?: \([^|]*\))? \|", PAGE, flags=re.MULTILINE))
    assert {name: float(value) for name, value in rows.items()} == {
        part.name: getattr(costs, part.name) for part in fields(costs)
    }


def test_the_options_that_the_page_names_exist(capsys: pytest.CaptureFixture[str]) -> None:
    offered = set()
    for command in (["sim"], ["trace", "generate"], ["trace", "convert"], ["trace", "info"]):
        assert main([*command, "--help"]) == 0
        offered |= set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", PAGE)) <= offered
