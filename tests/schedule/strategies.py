"""Schedules of all kinds and sizes for property tests."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from oobleck.schedule import SECTIONED_KINDS, Schedule, ScheduleKind, compile_schedule


@st.composite
def schedules(draw: st.DrawFn, *, min_microbatches: int = 0, max_microbatches: int = 18) -> Schedule:
    kind = draw(st.sampled_from(ScheduleKind))
    num_chunks = draw(st.integers(1, 4)) if kind is ScheduleKind.INTERLEAVED else 1
    num_microbatches = draw(st.integers(min_microbatches, max_microbatches))
    num_stages = draw(st.integers(1 if num_chunks == 1 else 2, 7))
    num_rounds = math.ceil(num_microbatches / (num_stages if num_chunks > 1 else 1))
    most_sections = max(1, min(4, num_rounds)) if kind in SECTIONED_KINDS else 1
    return compile_schedule(
        kind,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        num_sections=draw(st.integers(1, most_sections)),
        commits=draw(st.booleans()),
    )
