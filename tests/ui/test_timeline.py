from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.schedule import ScheduleKind, StageCost, Timeline, compile_schedule, timeline
from oobleck.ui.pictures import chrome_trace, timeline_svg
from oobleck.ui.timeline import Figure, timeline_lines

SVG = "{http://www.w3.org/2000/svg}"


def evaluate(
    kind: ScheduleKind, num_stages: int, num_microbatches: int, num_chunks: int = 1, **cost: float
) -> Timeline:
    schedule = compile_schedule(kind, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
    return timeline(schedule, [StageCost(**cost)] * (num_stages * num_chunks))


def figure(found: Timeline, title: str = "pipeline 0") -> Figure:
    labels = tuple(f"stage {stage}" for stage in range(found.schedule.num_stages))
    return Figure(title=title, labels=labels, timeline=found)


def test_a_step_that_fits_is_drawn_to_scale_with_its_microbatches():
    found = evaluate(ScheduleKind.ONE_F_ONE_B, 2, 2, forward_s=2, backward_s=4, reduce_s=2)
    lines = [line.plain.rstrip() for line in timeline_lines(found, width=28)]
    assert lines == [
        "stage 0 0█1█····0▓▓▓··1▓▓▓==",
        "stage 1 ··0█0▓▓▓1█1▓▓▓==····",
        "        0.000 s       20.0 s",
        "· idle 33.3 % up to the last",
        "█ forward  ▓ backward",
        "= reduce",
    ]


def test_a_long_step_is_drawn_from_both_ends():
    found = evaluate(ScheduleKind.ONE_F_ONE_B, 4, 200, forward_s=1, backward_s=2, optimizer_s=5)
    first, *_, axis, _legend = (line.plain for line in timeline_lines(found, width=80))
    assert len(first) <= 80
    startup, _, end = first.partition(" ⋯ ")
    assert startup.startswith("stage 0 ████·")
    assert end.endswith("·▓▓·▓▓·▓▓%%%%%")
    assert axis.split() == ["0.000", "s", "34.0", "s", "580", "s", "614", "s"]


def test_a_step_is_drawn_whole_where_its_ends_would_overlap():
    # The pipeline takes so long to fill that both ends together show more than there is.
    found = evaluate(ScheduleKind.ONE_F_ONE_B, 12, 14, forward_s=1, backward_s=2, send_forward_s=20)
    first, *_ = (line.plain for line in timeline_lines(found, width=60))
    assert "⋯" not in first
    assert len(first) == 60


@given(
    kind=st.sampled_from(ScheduleKind),
    num_stages=st.integers(1, 12),
    num_microbatches=st.integers(0, 40),
    width=st.integers(1, 200),
    forward_s=st.sampled_from([0.0, 1e-9, 0.3, 5e3]),
)
def test_no_line_is_wider_than_the_terminal(kind, num_stages, num_microbatches, width, forward_s):
    found = evaluate(kind, num_stages, num_microbatches, forward_s=forward_s, backward_s=0.7, reduce_s=0.1)
    lines = timeline_lines(found, width=width)
    assert len(lines) >= num_stages + 2
    assert all(line.cell_len <= width for line in lines)


@given(width=st.integers(60, 200), num_microbatches=st.integers(1, 6))
def test_columns_show_the_share_of_time_of_each_pass(width, num_microbatches):
    found = evaluate(ScheduleKind.GPIPE, 3, num_microbatches, forward_s=1, backward_s=3)
    for line, spans in zip(timeline_lines(found, width=width), found.spans, strict=False):
        drawn = line.plain[len("stage 0 ") :]
        column_s = found.makespan_s / len(drawn)
        busy_columns = sum(glyph != "·" for glyph in drawn)
        # Each busy stretch may gain or lose half a column at both of its ends.
        stretches = sum(1 for busy, _ in groupby(drawn, key=lambda glyph: glyph != "·") if busy)
        busy_s = sum(span.end_s - span.start_s for span in spans)
        assert busy_columns * column_s == pytest.approx(busy_s, abs=(stretches + 1e-6) * column_s)


def test_kinds_of_work_differ_without_colour():
    found = evaluate(ScheduleKind.ZERO_BUBBLE, 2, 2, forward_s=1, backward_s=2, reduce_s=1, commit_s=1, optimizer_s=1)
    legend = " ".join(line.plain for line in timeline_lines(found, width=100)[3:])
    assert "█ forward" in legend
    assert legend.count("▓ backward") == 1
    assert "▒ weight gradients" in legend
    assert "= reduce" in legend
    assert "| commit" in legend
    assert "% optimizer" in legend


def test_stages_can_be_named():
    found = evaluate(ScheduleKind.GPIPE, 2, 1, forward_s=1, backward_s=1)
    lines = [line.plain for line in timeline_lines(found, width=40, labels=["node1", "node12"])]
    assert lines[0].startswith("node1  ")
    assert lines[1].startswith("node12 ")


def test_a_picture_has_a_bar_for_every_pass_and_says_what_it_is():
    found = evaluate(ScheduleKind.ZERO_BUBBLE, 3, 4, forward_s=1, backward_s=2, reduce_s=1)
    root = ElementTree.fromstring(timeline_svg([figure(found, "a < b & c")]))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert len(titles) == sum(len(spans) for spans in found.spans)
    assert titles[0] == "forward, microbatch 0, 0.000 s to 1.00 s"
    assert "weight gradients, microbatch 3, 13.0 s to 14.0 s" in titles
    assert titles[-1] == "reduce, 14.0 s to 15.0 s"
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == f"a < b & c: {found.makespan_s:.1f} s, 14.3 % bubble"
    assert {"stage 0", "stage 1", "stage 2", "forward", "backward", "weight gradients", "reduce", "idle"} <= set(texts)


def test_bars_of_all_timelines_share_a_scale_and_stay_inside():
    short = evaluate(ScheduleKind.GPIPE, 2, 2, forward_s=1, backward_s=1)
    long = evaluate(ScheduleKind.GPIPE, 2, 6, forward_s=1, backward_s=1)
    root = ElementTree.fromstring(timeline_svg([figure(short), figure(long)]))
    width, height = float(root.get("width")), float(root.get("height"))
    bars = [
        bar for bar in root.iter(f"{SVG}rect") if bar.get("fill") == "#4c78a8" and bar.find(f"{SVG}title") is not None
    ]
    assert len(bars) == 2 * 2 + 2 * 6
    assert len({bar.get("width") for bar in bars}) == 1
    for bar in root.iter(f"{SVG}rect"):
        assert float(bar.get("x", "0")) + float(bar.get("width")) <= width
        assert float(bar.get("y", "0")) + float(bar.get("height")) <= height


def test_chunks_are_named_in_pictures():
    found = evaluate(ScheduleKind.INTERLEAVED, 2, 2, 2, forward_s=1, backward_s=1)
    assert "forward, microbatch 1, chunk 1, " in timeline_svg([figure(found)])


def test_a_step_in_which_nothing_takes_time_can_be_drawn():
    found = evaluate(ScheduleKind.ONE_F_ONE_B, 2, 0, forward_s=1, backward_s=1)
    ElementTree.fromstring(timeline_svg([figure(found)]))
    assert len(timeline_lines(found, width=60)) == 4


def test_a_trace_has_a_thread_for_every_stage_and_link():
    found = evaluate(ScheduleKind.ONE_F_ONE_B, 2, 3, forward_s=1, backward_s=2, send_forward_s=0.25)
    trace = json.loads(chrome_trace([figure(found), figure(found, "pipeline 1")]))
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0, 0] == "stage 0"
    assert names[1, 1] == "stage 1"
    assert names[0, 2] == "forward link from stage 0 to stage 1"
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["pipeline 0", "pipeline 1"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 2 * (sum(map(len, found.spans)) + len(found.transfers))
    first_send = next(e for e in slices if e["tid"] == 2)
    assert (first_send["name"], first_send["cat"], first_send["ts"], first_send["dur"]) == (
        "send_f:0",
        "send",
        1e6,
        25e4,
    )
