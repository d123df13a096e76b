from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from oobleck.control.journal.summary import EvaluationSummary, NodeSummary, summarize
from oobleck.ui.summary_table import summary_table
from tests.control.journals import run_with_a_loss


def printed(summary, width: int = 80) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(summary_table(summary))
    return output.getvalue()


@pytest.mark.parametrize("width", [40, 80, 160])
def test_it_fits(width):
    assert max(map(len, printed(summarize(run_with_a_loss()), width).splitlines())) <= width


@pytest.mark.parametrize("width", [80, 160])
def test_it_tells_what_was_trained(width):
    text = printed(summarize(run_with_a_loss()), width)
    for words in ("120 of 120", "1,920", "7.8431 → 2.3529", "91.6 %", "starting 5.00 s", "pipelines", "28.0 MB"):
        assert words in text


def test_it_tells_what_nodes_were_there_for():
    nodes = NodeSummary(
        there=1024.0, training=900.0, idle=100.0, recovering=20.0, other=4.0, per_step=0.5, per_million_tokens=0.0123
    )
    text = " ".join(printed(replace(summarize(run_with_a_loss()), node_hours=nodes), 160).split())
    told = "training 900.0 (87.9 %), idle 100.0 (9.8 %), recovering 20.0 (2.0 %), other 4.00 (0.4 %)"
    assert f"1,024.0: {told}; 0.0123 per million tokens" in text
    assert "node-hours" not in printed(replace(summarize(run_with_a_loss()), node_hours=None))


def test_it_tells_what_evaluations_came_to():
    told = (EvaluationSummary(step=10, loss=5.0), EvaluationSummary(step=20, loss=4.25))
    text = printed(replace(summarize(run_with_a_loss()), evaluations=told))
    assert "5.0000 → 4.2500 after step 20" in text
    assert "evaluation loss" not in printed(summarize(run_with_a_loss()))


def test_without_recoveries_there_is_no_table_of_them():
    summary = replace(summarize(run_with_a_loss()), recoveries=())
    assert "Recoveries" not in printed(summary)


def test_many_recoveries_are_cut_to_the_newest():
    summary = summarize(run_with_a_loss())
    recoveries = tuple(replace(summary.recoveries[0], t_s=float(t), nodes=(f"n{t}",)) for t in range(30))
    text = printed(replace(summary, recoveries=recoveries), 100)
    assert "the first 10 are left out" in text
    assert "n29:" in text
    assert "n9:" not in text


def test_an_empty_run_can_be_shown():
    assert "0 of 0" in printed(summarize([]))
