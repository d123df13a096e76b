from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from oobleck.control.journal.snapshot import (
    EventLine,
    NodeState,
    NodeView,
    PipelineView,
    RunSnapshot,
    RunState,
    StageView,
    WorkState,
)
from oobleck.control.journal.view import RunView
from oobleck.ui.dashboard import Dashboard, dashboard_lines
from tests.control.journals import run_with_a_loss, script_with_a_failure


def snapshot_of(num_pipelines: int, stages: int, now_s: float) -> RunSnapshot:
    view = RunView()
    for entry in run_with_a_loss(num_pipelines, stages):
        if entry.t_s <= now_s:
            view.apply(entry)
    return view.at(now_s)


def plain(snapshot: RunSnapshot, width: int, height: int, fill: bool = True) -> list[str]:
    return [line.plain for line in dashboard_lines(snapshot, width=width, height=height, fill=fill)]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_a_small_run_is_shown_whole(width, height):
    lines = plain(snapshot_of(2, 2, 20.0), width, height)
    text = "\n".join(lines)
    assert lines[0].split() == ["Oobleck", "gpt2-demo", "(gpt2)", "●", "training"]
    for word in (
        "step 30/120",
        "loss 5.0000",
        "tokens/s 4,096",
        "generation 1",
        "elapsed 0:00:20",
        "remaining 0:00:45",
    ):
        assert word in text
    for node in ("node0", "node1", "node2", "node3"):
        assert text.count(f"{node} ") >= 2  # in the map and among the nodes
    assert text.count("layers 0-3") == 2
    assert lines[-1].endswith("generation 1: 2 pipelines on 4 nodes")


@pytest.mark.parametrize("num_nodes", [4, 40])
def test_what_has_given_a_node_is_shown_where_there_are_few(num_nodes):
    snapshot = snapshot_of(num_nodes // 2, 2, 20.0)
    nodes = tuple(replace(node, origin=f"Slurm's job {number}") for number, node in enumerate(snapshot.nodes))
    text = "\n".join(plain(replace(snapshot, nodes=nodes), 80, 40))
    assert ("node3 training Slurm's job 3" in text) == ("Slurm's job" in text) == (num_nodes == 4)


def test_a_script_has_no_steps_that_are_known():
    view = RunView()
    for entry in script_with_a_failure():
        view.apply(entry)
    text = "\n".join(plain(view.at(40.0), 80, 24))
    assert "my-script" in text
    assert "recoveries 1" in text
    assert "protected step 8 (newest 9)" in text
    for words in ("step 0/", "loss", "goodput", "remaining"):
        assert words not in text


def test_a_loss_is_told_in_the_map_the_nodes_and_the_events():
    text = "\n".join(plain(snapshot_of(2, 2, 25.21), 80, 24))
    assert "reconfiguring" in text
    assert "✗ node3 lost" in text
    assert "node3 lost: " in text


def test_64_nodes_fit_a_small_terminal_and_the_lost_one_is_shown():
    lines = plain(snapshot_of(16, 4, 25.21), 80, 24)
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert "✗ node7 lost" in text
    assert text.count("■") + text.count("✗") - 1 == 64  # a mark for each stage; the other ✗ is among the nodes
    assert "63 training" in text


def test_more_pipelines_than_fit_keep_the_broken_one_in_sight():
    lines = plain(snapshot_of(128, 2, 25.21), 80, 14)
    assert len(lines) <= 14
    assert any("1 ×8" in line and "■✗" in line for line in lines)
    assert any("more pipelines" in line for line in lines)


def test_what_is_left_standing_leaves_room_for_the_prompt():
    output = io.StringIO()
    Console(file=output, width=80, height=24).print(Dashboard(snapshot_of(16, 4, 99.0), fill=False))
    assert output.getvalue().count("\n") <= 22
    assert "remaining" not in output.getvalue()


def test_without_fill_it_is_as_high_as_its_content():
    lines = plain(snapshot_of(2, 2, 20.0), 80, 50, fill=False)
    assert len(lines) < 30
    assert "Events" in "\n".join(lines)


def test_the_words_of_others_cannot_break_the_frame():
    event = EventLine(t_s=1.0, level="error", text="Traceback:\n  File x\r\n\x1b[2J\tboom [red]not markup[/red]")
    snapshot = RunSnapshot(tag="t", events=(event,))
    lines = plain(snapshot, 80, 24)
    assert len(lines) <= 24
    assert all(character.isprintable() for line in lines for character in line)
    assert "[red]not markup[/red]" in lines[-1]


names = st.text(st.sampled_from("abcnode0123456789.-日本#é"), min_size=1, max_size=40)
stages = st.builds(
    StageView,
    node=names,
    first_layer=st.integers(0, 500),
    stop_layer=st.integers(501, 1000),
    num_devices=st.sampled_from((1, 8)),
    state=st.sampled_from(list(WorkState)),
)
snapshots = st.builds(
    RunSnapshot,
    tag=names,
    model=names,
    state=st.sampled_from(list(RunState)),
    step=st.integers(0, 10**7),
    max_steps=st.integers(0, 10**7),
    loss=st.none() | st.floats(),
    tokens_per_s=st.none() | st.floats(0, 1e12),
    remaining_s=st.none() | st.floats(0, 1e8),
    pipelines=st.lists(
        st.builds(
            PipelineView,
            num_microbatches=st.integers(1, 4096),
            stages=st.lists(stages, min_size=1, max_size=70).map(tuple),
        ),
        max_size=70,
    ).map(tuple),
    nodes=st.lists(
        st.builds(
            NodeView,
            name=names,
            state=st.sampled_from(list(NodeState)),
            heard_s_ago=st.none() | st.floats(0, 1e6),
        ),
        max_size=300,
    ).map(tuple),
    events=st.lists(
        st.builds(
            EventLine,
            t_s=st.floats(0, 1e7),
            level=st.sampled_from(("info", "warning", "error", "odd")),
            text=st.text(max_size=300),
        ),
        max_size=120,
    ).map(tuple),
)


@given(snapshots, st.integers(1, 200), st.integers(1, 80), st.booleans())
def test_it_never_overflows_the_screen(snapshot, width, height, fill):
    lines = dashboard_lines(snapshot, width=width, height=height, fill=fill)
    assert len(lines) <= height
    assert max((line.cell_len for line in lines), default=0) <= width


def test_a_console_prints_what_was_drawn():
    output = io.StringIO()
    Console(file=output, width=80, height=24).print(Dashboard(snapshot_of(2, 2, 20.0)))
    printed = output.getvalue().rstrip("\n").split("\n")
    assert len(printed) <= 24
    assert [line.rstrip() for line in printed] == [line.rstrip() for line in plain(snapshot_of(2, 2, 20.0), 80, 24)]
