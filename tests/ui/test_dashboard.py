from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from oobleck.control.journal import StepsSaved
from oobleck.control.journal.snapshot import (
    EventLine,
    NodeState,
    NodeView,
    PhaseView,
    PipelineView,
    RunSnapshot,
    RunState,
    StageView,
    UseView,
    WorkState,
)
from oobleck.control.journal.view import RunView
from oobleck.ui.controls import HELP, LEGEND, Controls, Mode
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
    assert "━" not in text, "nobody knows what share of it is done"
    assert "recoveries 1" in text
    assert "protected step 8 (newest step 9)" in text
    for words in ("step 0/", "loss", "goodput", "remaining"):
        assert words not in text


def test_a_script_that_saves_shows_its_steps():
    view = RunView()
    for entry in script_with_a_failure():
        view.apply(entry)
    view.apply(StepsSaved(t_s=35.0, generation=2, first_step=6, step=9, worked_s=2.0, loss=0.25))
    text = "\n".join(plain(view.at(35.0), 80, 24))
    for words in ("step 9 ", "loss 0.2500", "step time 0.50", "goodput "):
        assert words in text
    for words in ("step 9/", "tokens/s", "remaining", "━"):
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
uses = st.builds(
    UseView,
    cores=st.floats(0, 1e3),
    num_cores=st.integers(1, 1024),
    used_bytes=st.integers(0, 1 << 44),
    memory_bytes=st.integers(1, 1 << 44),
    devices=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1 << 40), st.integers(1, 1 << 40)), max_size=9).map(
        tuple
    ),
)
curves = st.lists(st.floats(0, 1e9), min_size=2, max_size=300)
controls = st.builds(
    Controls,
    mode=st.sampled_from(list(Mode)),
    what=st.sampled_from(("kill", "drain", "stop")),
    typed=names,
    node=names,
    scrolled=st.integers(0, 200),
    message=st.text(max_size=300),
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
    losses=st.just(()) | curves.map(tuple),
    speeds=curves.map(tuple),
    phase=st.none()
    | st.builds(PhaseView, name=names, text=names, num_done=st.integers(0, 9), elapsed_s=st.floats(0, 1e6)),
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
            use=st.none() | uses,
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


@given(snapshots, st.integers(1, 200), st.integers(1, 80), st.booleans(), st.none() | controls)
def test_it_never_overflows_the_screen(snapshot, width, height, fill, controls):
    lines = dashboard_lines(snapshot, width=width, height=height, fill=fill, controls=controls)
    assert len(lines) <= height
    assert max((line.cell_len for line in lines), default=0) <= width


def test_a_console_prints_what_was_drawn():
    output = io.StringIO()
    Console(file=output, width=80, height=24).print(Dashboard(snapshot_of(2, 2, 20.0)))
    printed = output.getvalue().rstrip("\n").split("\n")
    assert len(printed) <= 24
    assert [line.rstrip() for line in printed] == [line.rstrip() for line in plain(snapshot_of(2, 2, 20.0), 80, 24)]


def test_a_wide_terminal_has_charts_beside_the_pipelines_and_is_filled():
    snapshot = snapshot_of(2, 2, 20.0)
    lines = plain(snapshot, 160, 50)
    (titles,) = [line for line in lines if "Pipelines (2)" in line]
    assert "loss  5.0000 – 7.8431" in titles
    assert max(len(line.rstrip()) for line in lines) == 160
    narrow = plain(snapshot, 80, 24)
    assert any(line.startswith(" loss ") and "▄▄▄▄" in line for line in narrow)
    assert any(line.startswith(" tokens/s ") and line.endswith("0 – 4,096") for line in narrow)


def test_what_a_node_uses_is_shown_with_what_it_has():
    use = UseView(
        cores=6.2,
        num_cores=8,
        used_bytes=12_300_000_000,
        memory_bytes=64_000_000_000,
        devices=tuple((0.93, 31_000_000_000, 80_000_000_000) for _ in range(3)),
    )
    snapshot = snapshot_of(2, 2, 20.0)
    nodes = tuple(replace(node, use=use) for node in snapshot.nodes)
    text = "\n".join(plain(replace(snapshot, nodes=nodes), 120, 36))
    assert text.count("▆ cpu 6.2/8  ▂ mem 12.3/64 GB  ▇ gpu ×3 93% 93/240 GB") == 4


def test_a_phase_stands_in_the_place_of_the_progress():
    phase = PhaseView(name="importing", text="importing torch", num_done=1, num_all=4, elapsed_s=12.34)
    lines = plain(replace(snapshot_of(2, 2, 20.0), phase=phase), 80, 24)
    assert any("importing torch (1 of 4)  12.3 s" in line for line in lines)
    assert not any("━" in line for line in lines)


def test_the_last_line_tells_of_the_keys_and_of_what_they_have_begun():
    snapshot = snapshot_of(2, 2, 20.0)

    def last(controls: Controls, of: RunSnapshot = snapshot) -> str:
        return dashboard_lines(of, width=100, height=30, controls=controls)[-1].plain

    controls = Controls()
    assert last(controls).endswith("q quit, the run continues ")
    for key in ("k", "2"):
        controls.press(key, [node.name for node in snapshot.nodes], 9)
    assert "kill which node? 2▏  node2 " in last(controls)
    controls.press("enter", [node.name for node in snapshot.nodes], 9)
    assert last(controls) == " kill node2 at once, as if its power failed? y/n"
    starting = replace(snapshot, phase=PhaseView(name="importing", text="importing"))
    assert "before its first step, that ends the run" in last(controls, starting)


def test_help_explains_keys_signs_and_words():
    controls = Controls(mode=Mode.HELP)
    text = "\n".join(
        line.plain for line in dashboard_lines(snapshot_of(2, 2, 20.0), width=80, height=24, controls=controls)
    )
    for name, what in (*HELP, *LEGEND):
        assert name in text
        assert what in text
    assert "any key leaves this page" in text


def test_earlier_events_are_scrolled_to_and_long_ones_are_wrapped():
    events = tuple(EventLine(t_s=step, level="info", text=f"event {step} " + "word " * 30) for step in range(40))
    snapshot = replace(snapshot_of(2, 2, 20.0), events=events)
    lines = [line.plain for line in dashboard_lines(snapshot, width=80, height=24, controls=Controls(scrolled=25))]
    assert lines[-1].startswith(" 25 newer events: End ")
    shown = [line for line in lines if "event " in line]
    assert "event 14 " in shown[-1]
    assert not any("…" in line for line in lines[:-1])
    assert sum(line.count("word") for line in lines) == 30 * len(shown)
