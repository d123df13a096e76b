"""A run as HTML, and where it is not shown."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

from oobleck.cli.launch.display import Display, show_values_as_tables, snapshot_html
from oobleck.control.journal import NodeState, NodeView, RunSnapshot, RunState, summarize
from tests.control.journals import run_with_a_loss


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


def test_ipython_shows_summaries_and_states_as_tables():
    """Without it they are 30 lines of a dataclass's words."""
    show_values_as_tables()  # no shell yet
    shell = InteractiveShell.instance()
    try:
        show_values_as_tables()
        for value, word in (
            (summarize(run_with_a_loss()), "steps committed"),
            (RunSnapshot(tag="my-run", step=7, max_steps=20), "my-run"),
        ):
            shown, _ = shell.display_formatter.format(value)
            assert word in shown["text/html"]
            assert "<pre " in shown["text/html"]
    finally:
        InteractiveShell.clear_instance()
