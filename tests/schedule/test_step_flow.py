"""A step's time and memory, found without its history, are those of the timeline to the last bit."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from oobleck.schedule import Schedule, StageCost, compile_schedule, timeline
from oobleck.schedule.step_flow import step_flow
from tests.examples import examples

from .strategies import schedules
from .test_timeline import stage_costs


@st.composite
def costed(draw: st.DrawFn) -> tuple[Schedule, list[StageCost]]:
    """A schedule with one section, and costs of passes and messages."""
    drawn = draw(schedules(max_microbatches=12))
    schedule = compile_schedule(
        drawn.kind,
        num_stages=drawn.num_stages,
        num_microbatches=drawn.num_microbatches,
        num_chunks=drawn.num_chunks,
    )
    size = drawn.num_stages * drawn.num_chunks
    costs = draw(st.lists(stage_costs(), min_size=size, max_size=size))
    return schedule, [replace(cost, load_s=0.0, reduce_s=0.0, commit_s=0.0, optimizer_s=0.0) for cost in costs]


@examples(200)
@given(case=costed())
def test_a_step_takes_and_holds_what_its_timeline_says(case: tuple[Schedule, list[StageCost]]) -> None:
    schedule, costs = case
    flow = step_flow(
        schedule.kind,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        num_chunks=schedule.num_chunks,
    )
    found = timeline(schedule, costs)
    assert flow.step_s(costs) == found.makespan_s
    assert flow.peak_memory_bytes(costs) == found.peak_memory_bytes
