"""Messages between two stages that are neighbours both ways: of two, the last is before the first chunk's next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oobleck.schedule import ScheduleKind, compile_schedule


@given(num_microbatches=st.integers(0, 24), num_chunks=st.integers(1, 6))
def test_two_stages_agree_on_the_order_of_all_messages_one_way(num_microbatches: int, num_chunks: int):
    """One connection of NCCL's carries hidden states and gradients from one worker to the other, in one order."""
    schedule = compile_schedule(
        ScheduleKind.INTERLEAVED, num_stages=2, num_microbatches=num_microbatches, num_chunks=num_chunks
    )
    sent: dict[tuple[int, int], list[object]] = {}
    received: dict[tuple[int, int], list[object]] = {}
    for stage, program in enumerate(schedule.programs):
        wires = schedule.wires_of(stage)
        for instruction in program:
            if (wire := wires.get((instruction.op, instruction.chunk))) is not None:
                message = instruction.microbatch, wire.source_chunk, wire.link.is_forward
                ends = sent if wire.is_send else received
                ends.setdefault((wire.link.source, wire.link.target), []).append(message)
    assert sent == received
