from __future__ import annotations

from pathlib import Path

import pytest

from oobleck.sim.policies import POLICIES
from tools.compare import main, table

PAGE = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_system(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--smoke"])
    head, _, *rows, _, losses = capsys.readouterr().out.splitlines()
    assert head == "| | samples/s | goodput | steps lost |"
    assert len(rows) == len(POLICIES) + 1
    rates = [float(row.split("|")[2].split()[0]) for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0
    assert "`schedule: auto`" in rows[0]
    assert losses.endswith("losses in 0.25 days of 8 nodes, 2 seeds")


@pytest.mark.slow
def test_the_page_has_the_table_as_the_command_prints_it() -> None:
    *rows, _, losses = table(64, 7.0, 1.0, 1.0, 5)
    assert "\n".join(rows) in PAGE
    assert losses.split(" in ")[0] in " ".join(PAGE.split())
