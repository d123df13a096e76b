"""A run as HTML, and where it is not shown."""

from __future__ import annotations

from oobleck.cli.launch.display import Display, snapshot_html
from oobleck.control.journal import NodeState, NodeView, RunSnapshot, RunState


def test_the_dashboard_as_html_has_what_the_terminal_has_and_no_codes_of_it():
    nodes = (NodeView(name="<node0>", state=NodeState.LOST, heard_s_ago=None),)
    html = snapshot_html(RunSnapshot(tag="my-run", state=RunState.TRAINING, step=7, max_steps=20, nodes=nodes))
    assert html.startswith("<pre ")
    assert "my-run" in html
    assert "training" in html
    assert "&lt;node0&gt;" in html
    assert "\x1b" not in html
    assert html.count("<span style=") > 3


def test_without_a_notebook_nothing_is_asked():
    class Shown:
        def __repr__(self) -> str:
            raise AssertionError("asked")

    with Display(Shown(), changes=True) as display:
        display.update()
