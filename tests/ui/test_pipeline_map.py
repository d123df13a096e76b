from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.journal.snapshot import NodeState, PipelineView, RunState, StageView, WorkState
from oobleck.ui.pipeline_map import STATE_STYLES, pipeline_lines


def pipeline(num_stages: int, *, name: str = "node", state: WorkState = WorkState.TRAINING, **lost) -> PipelineView:
    return PipelineView(
        num_microbatches=8,
        stages=tuple(
            StageView(
                node=f"{name}{index}",
                first_layer=2 * index,
                stop_layer=2 * index + 2,
                num_devices=1,
                state=WorkState.LOST if index == lost.get("lost") else state,
            )
            for index in range(num_stages)
        ),
    )


def drawn(*pipelines: PipelineView, width: int = 80, height: int = 20) -> list[str]:
    return [line.plain for line in pipeline_lines(pipelines, width=width, height=height)]


def test_every_state_has_a_style():
    assert STATE_STYLES.keys() == {*RunState, *NodeState, *WorkState}


def test_with_room_stages_are_boxes_joined_by_arrows():
    assert [line.rstrip() for line in drawn(pipeline(2), width=40)] == [
        "     ╭ layers 0-1 ──╮ ╭ layers 2-3 ──╮",
        "0 ×8 │ node0        │→│ node1        │",
        "     ╰──────────────╯ ╰──────────────╯",
    ]


def test_with_few_lines_stages_are_cells():
    assert [line.split() for line in drawn(pipeline(2), pipeline(1, name="other"), height=5)] == [
        ["0", "×8", "▌node0", "0-1", "▌node1", "2-3"],
        ["1", "×8", "▌other0", "0-1"],
    ]


def test_with_few_columns_every_stage_is_a_block():
    (line,) = drawn(pipeline(40, lost=7))
    assert line.split() == ["0", "×8", "■" * 7 + "✗" + "■" * 32]


def test_more_stages_than_columns_still_show_the_lost_one():
    (line,) = drawn(pipeline(1000, lost=777))
    assert len(line) == 80
    assert line.count("✗") == 1


@pytest.mark.parametrize("state", list(WorkState))
def test_a_stage_has_the_colour_of_its_state(state):
    for height in (1, 3):
        (line, *_) = pipeline_lines([pipeline(1, state=state)], width=80, height=height)
        assert STATE_STYLES[state] in {span.style for span in line.spans}


def test_colours_are_not_the_only_sign_of_trouble():
    assert "node1 ✗" in drawn(pipeline(2, lost=1))[1]
    assert "node0 ~" in drawn(pipeline(2, state=WorkState.RECONFIGURING))[1]


def test_with_fewer_lines_cells_shrink_and_stand_side_by_side():
    assert drawn(*[pipeline(2)] * 4, height=2, width=76) == [
        "0 ×8 ▌node0 0-1    ▌node1 2-3     1 ×8 ▌node0 0-1    ▌node1 2-3    ",
        "2 ×8 ▌node0 0-1    ▌node1 2-3     3 ×8 ▌node0 0-1    ▌node1 2-3    ",
    ]


def test_then_blocks_stand_side_by_side():
    lines = drawn(*[pipeline(2)] * 20, height=3)
    assert lines[0].split() == [part for index in range(8) for part in (str(index), "×8", "■■")]
    assert [line.count("■■") for line in lines] == [8, 8, 4]


def test_pipelines_in_trouble_are_kept_when_not_all_fit():
    pipelines = [pipeline(2, name=f"p{index}-", lost=1 if index == 90 else None) for index in range(100)]
    lines = drawn(*pipelines, height=2)
    assert lines[0].endswith("90 ×8 ■✗")
    assert lines[-1] == "… and 92 more pipelines"


def test_when_all_fit_nothing_is_left_out():
    assert not any("more" in line for line in drawn(*[pipeline(2)] * 20, height=20))


def test_long_names_are_cut_in_the_middle():
    long = pipeline(4, name="compute-rack17-slot-")
    (line,) = drawn(long, height=1)
    assert "comput…lot-3 6-7" in line


def test_several_devices_are_counted():
    stage = replace(pipeline(1).stages[0], num_devices=4)
    assert "node0×4" in drawn(PipelineView(num_microbatches=1, stages=(stage,)))[1]


@pytest.mark.parametrize(("pipelines", "height"), [((), 10), ((pipeline(2),), 0)])
def test_nothing_to_draw_or_nowhere_is_nothing(pipelines, height):
    assert drawn(*pipelines, height=height) == []
