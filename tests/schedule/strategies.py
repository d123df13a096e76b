"""Schedules of all kinds and sizes for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from oobleck.schedule import Schedule, ScheduleKind, compile_schedule


@st.composite
def schedules(draw: st.DrawFn, *, min_microbatches: int = 0) -> Schedule:
    return compile_schedule(
        draw(st.sampled_from([ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])),
        num_stages=draw(st.integers(1, 7)),
        num_microbatches=draw(st.integers(min_microbatches, 18)),
        commits=draw(st.booleans()),
    )
