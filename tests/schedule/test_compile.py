from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.schedule import (
    Op,
    ScheduleError,
    ScheduleKind,
    check_schedule,
    compile_schedule,
    peak_in_flight,
    section_stops,
)
from tests.schedule.executor import execute
from tests.schedule.strategies import schedules


@given(schedule=schedules(), buffers=st.integers(1, 3))
def test_whatever_is_compiled_is_sound(schedule, buffers):
    check_schedule(schedule, buffers=buffers)


@given(schedule=schedules(), seed=st.integers(0, 2**16), buffers=st.integers(1, 3))
def test_any_interleaving_computes_the_gradients_of_the_model(schedule, seed, buffers):
    assert execute(schedule, seed=seed, buffers=buffers) == peak_in_flight(schedule)


@given(schedule=schedules())
def test_gradients_are_summed_in_the_order_of_the_microbatches(schedule):
    for program in schedule.programs:
        for chunk in range(schedule.num_chunks):
            for ops in ((Op.FORWARD,), (Op.BACKWARD, Op.BACKWARD_WEIGHT)):
                order = [i.microbatch for i in program if i.op in ops and i.chunk == chunk]
                assert order == list(range(schedule.num_microbatches))


@given(num_stages=st.integers(1, 9), num_microbatches=st.integers(0, 20))
def test_1f1b_holds_no_more_activations_than_stages_are_left(num_stages, num_microbatches):
    schedule = compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=num_stages, num_microbatches=num_microbatches)
    expected = tuple(min(num_microbatches, num_stages - stage) for stage in range(num_stages))
    assert peak_in_flight(schedule) == expected
    check_schedule(schedule, max_in_flight=expected)


def test_gpipe_holds_the_activations_of_all_microbatches():
    assert peak_in_flight(compile_schedule(ScheduleKind.GPIPE, num_stages=3, num_microbatches=7)) == (7, 7, 7)


@given(schedule=schedules())
def test_a_program_that_commits_ends_with_reduction_commit_and_optimizer_step(schedule):
    for program in schedule.programs:
        tail = [Op.REDUCE_GRAD, Op.COMMIT, Op.OPTIMIZER_STEP] if schedule.commits else []
        assert [instruction.op for instruction in program if instruction.op.is_tail] == tail


def test_an_extra_program_has_no_tail():
    extra = compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=2, num_microbatches=3, commits=False)
    whole = compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=2, num_microbatches=3)
    assert not extra.commits
    assert tuple(program[:-3] for program in whole.programs) == extra.programs


def test_a_pipeline_without_microbatches_still_commits_the_step():
    schedule = compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=2, num_microbatches=0)
    assert [[i.op for i in program] for program in schedule.programs] == [
        [Op.REDUCE_GRAD, Op.COMMIT, Op.OPTIMIZER_STEP]
    ] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_stages": 0, "num_microbatches": 1}, "num_stages is 0; a schedule needs at least 1"),
        ({"num_stages": 1, "num_microbatches": -1}, "num_microbatches is -1; a schedule needs at least 0"),
        ({"num_stages": 2, "num_microbatches": 1, "num_chunks": 2}, "num_chunks is 2; 1f1b takes 1"),
        ({"num_stages": 2, "num_microbatches": 1, "num_chunks": 0, "kind": "interleaved"}, "num_chunks is 0; .* 1"),
        ({"num_stages": 1, "num_microbatches": 1, "num_chunks": 2, "kind": "interleaved"}, "would send to itself"),
    ],
)
def test_impossible_numbers_are_refused(arguments, message):
    kind = ScheduleKind(arguments.pop("kind", "1f1b"))
    with pytest.raises(ScheduleError, match=message):
        compile_schedule(kind, **arguments)


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
def test_interleaving_takes_any_number_of_microbatches(num_chunks):
    for num_stages in range(2, 7):
        for num_microbatches in range(3 * num_stages + 1):
            check_schedule(
                compile_schedule(
                    ScheduleKind.INTERLEAVED,
                    num_stages=num_stages,
                    num_microbatches=num_microbatches,
                    num_chunks=num_chunks,
                )
            )


def test_interleaving_with_one_chunk_is_1f1b():
    numbers = {"num_stages": 4, "num_microbatches": 6}
    one_chunk = compile_schedule(ScheduleKind.INTERLEAVED, **numbers)
    assert one_chunk.programs == compile_schedule(ScheduleKind.ONE_F_ONE_B, **numbers).programs


@given(num_stages=st.integers(1, 7), num_microbatches=st.integers(0, 16))
def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b(num_stages, num_microbatches):
    schedule = compile_schedule(ScheduleKind.ZERO_BUBBLE, num_stages=num_stages, num_microbatches=num_microbatches)
    assert peak_in_flight(schedule) == (min(num_stages, num_microbatches),) * num_stages


def test_every_kind_is_compiled_anew_for_other_numbers_and_kept_for_the_same():
    first = compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=3, num_microbatches=5)
    assert compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=3, num_microbatches=5) is first
    assert compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=3, num_microbatches=6) != first


@pytest.mark.parametrize("kind", ScheduleKind)
def test_compiling_is_fast_enough_for_large_pipelines_and_for_recovery(kind):
    # Processor time, and several times what was measured, so that a busy machine does not fail it.
    assert _best_of_three(kind, num_stages=64, num_microbatches=512) < 1.0
    assert _best_of_three(kind, num_stages=4, num_microbatches=16) < 0.005


def _best_of_three(kind: ScheduleKind, **numbers: int) -> float:
    times = []
    for _ in range(3):
        compile_schedule.cache_clear()
        start = time.process_time()
        compile_schedule(kind, **numbers)
        times.append(time.process_time() - start)
    return min(times)


@given(num_microbatches=st.integers(1, 40), data=st.data())
def test_sections_are_of_like_length_and_none_is_empty(num_microbatches, data):
    stops = section_stops(num_microbatches, data.draw(st.integers(1, num_microbatches)))
    lengths = [stop - start for start, stop in pairwise((0, *stops))]
    assert stops[-1] == num_microbatches
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1


def test_every_stage_commits_at_the_end_of_each_section_but_the_last():
    schedule = compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=3, num_microbatches=8, num_sections=3)
    for program in schedule.programs:
        assert [instruction.microbatch for instruction in program if instruction.op is Op.COMMIT_SECTION] == [1, 4]


def test_sections_that_a_schedule_cannot_have_are_refused():
    with pytest.raises(ScheduleError, match="zero-bubble takes 1"):
        compile_schedule(ScheduleKind.ZERO_BUBBLE, num_stages=2, num_microbatches=8, num_sections=2)
    with pytest.raises(ScheduleError, match="num_sections is 9 with 8"):
        compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=2, num_microbatches=8, num_sections=9)
    with pytest.raises(ScheduleError, match="num_sections is 0"):
        compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=2, num_microbatches=8, num_sections=0)
