from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planner.md"


def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_planner", ROOT / "tools" / "bench" / "planner.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_of_the_documentation_run_as_they_stand() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert result.attempted >= 20
    assert result.failed == 0


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_the_predictions_beside_the_papers_measurements_are_the_planners(every: int) -> None:
    models = bench()
    rows = re.findall(r"^\| (\d\d) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(count) for count, _ in rows] == list(range(30, 14, -1))
    for count, cells in rows[::every]:
        expected = [
            f"{models.predict(model, int(count)):.3g} / {models.measured(model, int(count)):.3g}"
            for model in models.PAPER
        ]
        assert cells.split(" | ") == expected


def test_the_benchmark_makes_profiles_that_need_the_nodes_it_says() -> None:
    models = bench()
    for kind in models.KINDS:
        profile = models.make_profile(kind, 50, 1, smallest=4)
        planner = models.Planner(profile, models.PlannerSettings(num_microbatches=64))
        assert min(planner.templates(64)) in (4, 5)
