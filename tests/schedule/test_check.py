from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oobleck.schedule import (
    Instruction,
    Op,
    Schedule,
    ScheduleError,
    ScheduleKind,
    check_schedule,
    compile_schedule,
    parse_schedule,
)
from tests.schedule.executor import Broken, execute
from tests.schedule.strategies import schedules


@st.composite
def places(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    """A sound schedule and the place of one of its instructions."""
    schedule = draw(schedules(min_microbatches=1))
    stage = draw(st.integers(0, schedule.num_stages - 1))
    return schedule, stage, draw(st.integers(0, len(schedule.programs[stage]) - 1))


def with_program(schedule: Schedule, stage: int, program: list[Instruction]) -> Schedule:
    programs = list(schedule.programs)
    programs[stage] = tuple(program)
    return replace(schedule, programs=tuple(programs))


def is_accepted(schedule: Schedule) -> bool:
    try:
        check_schedule(schedule)
    except ScheduleError:
        return False
    return True


@given(place=places())
def test_a_dropped_instruction_is_caught_and_its_stage_named(place):
    schedule, stage, index = place
    program = list(schedule.programs[stage])
    assume(
        program[index].op is not Op.COMMIT_SECTION or schedule.num_stages > 1
    )  # alone, it is a step with fewer sections
    del program[index]
    with pytest.raises(ScheduleError) as caught:
        check_schedule(with_program(schedule, stage, program))
    # Without the last instruction of stage 0 the schedule does not claim to commit: the other stages do.
    assert caught.value.stage == stage or (stage == 0 and schedule.commits and index == len(program))
    assert caught.value.index is not None


@given(place=places(), data=st.data())
def test_a_duplicated_instruction_is_caught_and_its_stage_named(place, data):
    schedule, stage, index = place
    program = list(schedule.programs[stage])
    program.insert(data.draw(st.integers(0, len(program))), program[index])
    with pytest.raises(ScheduleError) as caught:
        check_schedule(with_program(schedule, stage, program))
    assert caught.value.stage == stage


@given(place=places(), data=st.data())
def test_an_instruction_of_another_microbatch_is_caught(place, data):
    schedule, stage, index = place
    program = list(schedule.programs[stage])
    instruction = program[index]
    assume(instruction.microbatch is not None)
    microbatch = data.draw(st.integers(0, schedule.num_microbatches + 1))
    assume(microbatch != instruction.microbatch)
    program[index] = replace(instruction, microbatch=microbatch)
    assert not is_accepted(with_program(schedule, stage, program))


@given(place=places(), data=st.data(), seed=st.integers(0, 2**16))
def test_whatever_is_accepted_after_a_swap_still_computes_the_gradients(place, data, seed):
    schedule, stage, index = place
    program = list(schedule.programs[stage])
    other = data.draw(st.integers(0, len(program) - 1))
    program[index], program[other] = program[other], program[index]
    swapped = with_program(schedule, stage, program)
    if is_accepted(swapped):
        execute(swapped, seed=seed)
    else:
        assert not _runs(swapped, seed) or _breaks_only_form(schedule.programs[stage], index, other)


def _runs(schedule: Schedule, seed: int) -> bool:
    try:
        execute(schedule, seed=seed)
    except Broken:
        return False
    return True


def _breaks_only_form(program: tuple[Instruction, ...], index: int, other: int) -> bool:
    """Whether the toy cannot see the difference: it takes reductions as they come."""
    return program[index].op.is_tail or program[other].op.is_tail


@given(place=places(), data=st.data())
def test_a_swap_of_what_depends_on_each_other_is_caught(place, data):
    schedule, stage, index = place
    program = list(schedule.programs[stage])
    first = program[index]
    later = [i for i in range(index + 1, len(program)) if program[i].microbatch == first.microbatch]
    assume(later)
    other = data.draw(st.sampled_from(later))
    # Loading and receiving do not depend on each other, nor do the gradients of input and weights.
    # The input's gradient may be sent before the others are committed or after.
    free = ({Op.LOAD, Op.RECV_F}, {Op.SEND_B, Op.BACKWARD_WEIGHT}, {Op.SEND_B, Op.COMMIT_SECTION})
    assume({first.op, program[other].op} not in free)
    program[index], program[other] = program[other], program[index]
    assert not is_accepted(with_program(schedule, stage, program))


SOUND = """\
1f1b stages=2 microbatches=2 chunks=1
0: load:0 forward:0 send_f:0 load:1 forward:1 send_f:1 recv_b:0 backward:0 recv_b:1 backward:1
1: load:0 recv_f:0 forward:0 backward:0 send_b:0 load:1 recv_f:1 forward:1 backward:1 send_b:1
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("load:0 forward:0 send", "forward:0 send", r"stage 0, instruction 0 (forward:0): comes before its load"),
        ("load:0 recv_f:0", "recv_f:0", "stage 1, instruction 1 (forward:0): comes before its load"),
        ("backward:1 send_b:1", "backward:1", "stage 1, instruction 9: send_b:1 is missing"),
        ("backward:0 send_b:0", "send_b:0 backward:0", "instruction 3 (send_b:0): comes before its backward_input"),
        ("backward:0 recv_b:1", "backward:0 backward:0 recv_b:1", "instruction 8 (backward:0): appears a second time"),
        ("backward:0 recv_b:1", "backward_weight:0 recv_b:1", "(backward_weight:0): comes before its backward_input"),
        ("backward:0 recv_b:1", "backward_input:0 recv_b:1", "stage 0, instruction 10: backward_weight:0 is missing"),
        ("backward:0 recv_b:1", "backward:0 backward_input:0 recv_b:1", "a backward pass is either whole or in two"),
        ("backward:0 recv_b:1", "backward_input:0 backward:0 recv_b:1", "a backward pass is either whole or in two"),
        ("backward:0 recv_b:1", "backward:0 send_b:0 recv_b:1", "instruction 8 (send_b:0): has no place here"),
        ("load:1 forward:1", "load:1 load:2 forward:1", "(load:2): is outside of the schedule's 2 microbatches"),
        ("load:1 forward:1", "load:1 forward:1/1", "(forward:1/1): is outside of the schedule's 2 microbatches and 1"),
        ("load:1 forward:1", "load:1 commit forward:1", "(commit): may appear only once"),
        ("send_b:1", "send_b:1 reduce_grad commit optimizer_step", "stage 1, instruction 10 (reduce_grad): may appear"),
        (
            "recv_b:0 backward:0 recv_b:1 backward:1",
            "recv_b:1 backward:1 recv_b:0 backward:0",
            "(recv_b:1): the next message of the backward link from stage 1 to stage 0 is send_b:0",
        ),
    ],
)
def test_an_error_names_the_place_and_the_rule(old, new, message):
    assert is_accepted(parse_schedule(SOUND))
    text = SOUND.replace(old, new, 1)
    assert text != SOUND
    with pytest.raises(ScheduleError) as caught:
        check_schedule(parse_schedule(text))
    assert message in str(caught.value)


def test_a_deadlock_is_told_with_both_its_ends():
    text = SOUND.replace(
        "forward:1 send_f:1 recv_b:0 backward:0 recv_b:1", "forward:1 recv_b:0 backward:0 recv_b:1 send_f:1"
    )
    with pytest.raises(ScheduleError) as caught:
        check_schedule(parse_schedule(text))
    reason = "deadlock: waits for stage 1, which is stuck at instruction 6 (recv_f:1)"
    assert str(caught.value) == f"stage 0, instruction 7 (recv_b:1): {reason}"


def test_a_stage_without_a_tail_among_stages_that_commit_is_caught():
    schedule = compile_schedule(ScheduleKind.GPIPE, num_stages=2, num_microbatches=1)
    with pytest.raises(ScheduleError, match="reduce_grad commit optimizer_step"):
        check_schedule(with_program(schedule, 1, list(schedule.programs[1][:-3])))
    with pytest.raises(ScheduleError, match=r"stage 1, instruction 0: "):
        check_schedule(with_program(schedule, 1, []))


PARTIAL = """\
1f1b stages=2 microbatches=2 chunks=1
0: load:0 forward:0 send_f:0 load:1 forward:1 send_f:1 recv_b:0 backward:0 commit_section:0 recv_b:1 backward:1
1: load:0 recv_f:0 forward:0 backward:0 send_b:0 commit_section:0 load:1 recv_f:1 forward:1 backward:1 send_b:1
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "backward:0 commit_section:0",
            "commit_section:0 backward:0",
            "(commit_section:0): comes before the backward pass of microbatch 0",
        ),
        (
            "commit_section:0 recv_b:1 backward:1",
            "recv_b:1 backward:1 commit_section:0",
            "comes after a backward pass of microbatch 1",
        ),
        (
            "commit_section:0 recv_b",
            "commit_section:1 recv_b",
            "(commit_section:1): commits nothing that the end of the step does not reduce",
        ),
        (
            "commit_section:0 recv_b",
            "recv_b",
            "stage 0, instruction 10: commit_section:0 is missing, which other stages have",
        ),
        (
            "commit_section:0 load:1",
            "commit_section:0 commit_section:0 load:1",
            "stage 1, instruction 12: commit_section:0 appears twice",
        ),
    ],
)
def test_a_commit_of_other_microbatches_than_it_says_is_caught(old, new, message):
    assert is_accepted(parse_schedule(PARTIAL))
    text = PARTIAL.replace(old, new, 1)
    assert text != PARTIAL
    with pytest.raises(ScheduleError) as caught:
        check_schedule(parse_schedule(text))
    assert message in str(caught.value)


def test_a_bound_on_activations_names_the_forward_pass_that_breaks_it():
    schedule = compile_schedule(ScheduleKind.GPIPE, num_stages=2, num_microbatches=4)
    check_schedule(schedule, max_in_flight=(4, 4))
    with pytest.raises(ScheduleError, match=r"stage 1, instruction 11 \(forward:3\): 4 .* 3$"):
        check_schedule(schedule, max_in_flight=(4, 3))


def test_a_schedule_that_needs_two_buffers_deadlocks_with_one():
    # Stage 0 sends everything before it takes a gradient; stage 1 waits for its gradients to be taken.
    patient = compile_schedule(ScheduleKind.GPIPE, num_stages=2, num_microbatches=4)
    eager = compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=2, num_microbatches=4)
    mixed = replace(patient, programs=(patient.programs[0], eager.programs[1]))
    check_schedule(mixed, buffers=2)
    execute(mixed, seed=0, buffers=2)
    with pytest.raises(ScheduleError, match=r"stage 0, instruction 11 \(send_f:3\): deadlock"):
        check_schedule(mixed, buffers=1)
    with pytest.raises(Broken, match="deadlock"):
        execute(mixed, seed=0, buffers=1)
