"""The table of what each choice of a plan saves, in docs/planner.md, is what tools/bench/choices.py prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import first_of
from tools.bench.choices import MODELS, Case, row_text, rows

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("model", first_of(1, MODELS))
def test_each_row_of_the_page_is_printed(model: str) -> None:
    num_nodes, degree = MODELS[model]
    case = Case(model=model, num_nodes=num_nodes, degree=degree)
    printed = [row_text(case, what, for_all, chosen_s) for what, for_all, chosen_s in rows(case)]
    assert len(printed) == 3
    assert [row for row in printed if row not in PAGE] == []
