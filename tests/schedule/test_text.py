from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.schedule import (
    Instruction,
    Op,
    ScheduleError,
    format_program,
    format_schedule,
    parse_program,
    parse_schedule,
)
from tests.schedule.strategies import schedules

instructions = st.builds(
    Instruction,
    st.sampled_from([op for op in Op if not op.is_tail]),
    st.integers(0, 10**9 - 1),
    st.integers(0, 10**9 - 1),
) | st.builds(Instruction, st.sampled_from([op for op in Op if op.is_tail]))


@given(program=st.lists(instructions).map(tuple))
def test_a_program_survives_its_text(program):
    assert parse_program(format_program(program)) == program


@given(schedule=schedules())
def test_a_schedule_survives_its_text(schedule):
    text = format_schedule(schedule)
    assert parse_schedule(text) == schedule
    assert format_schedule(parse_schedule(text)) == text


@given(text=st.text() | st.lists(st.sampled_from(["forward:0", "load", ":", "/", "1", "commit", "٣"])).map(" ".join))
def test_any_text_is_read_or_refused_with_a_reason(text):
    for parse in (parse_program, parse_schedule):
        try:
            parse(text)
        except ScheduleError as error:
            assert str(error)  # noqa: PT017 - both outcomes are right


def test_chunks_but_the_first_are_written():
    program = (Instruction(Op.FORWARD, 3), Instruction(Op.SEND_F, 3, 1), Instruction(Op.COMMIT))
    assert format_program(program) == "forward:3 send_f:3/1 commit"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("load:0 jump:0", "stage 4, instruction 1: 'jump:0' is not an instruction"),
        ("load:00", "instruction 0: 'load:00' is not an instruction"),
        ("load:0/0", "instruction 0: 'load:0/0' is not an instruction"),
        ("forward", "instruction 0: 'forward': forward needs a microbatch"),
        ("load:0 commit:1", "instruction 1: 'commit:1': commit takes no microbatch"),
    ],
)
def test_a_bad_instruction_is_named(text, message):
    with pytest.raises(ScheduleError) as caught:
        parse_program(text, stage=4)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is ''; it must be gpipe or 1f1b"),
        ("2f2b stages=1 microbatches=0 chunks=1\n0:", "line 1 is '2f2b stages=1"),
        ("1f1b stages=1 microbatches=0\n0:", "line 1 is '1f1b stages=1"),
        ("1f1b stages=1 microbatches=0 chunks=1\n1:", "line 2 is '1:'; it must start with '0:'"),
        ("1f1b stages=2 microbatches=0 chunks=1\n0:\n1", "line 3 is '1'; it must start with '1:'"),
        ("1f1b stages=2 microbatches=0 chunks=1\n0:", "1 programs for 2 stages"),
        ("1f1b stages=1 microbatches=1 chunks=0\n0:", "num_chunks is 0; a schedule needs at least 1"),
    ],
)
def test_a_bad_line_is_named(text, message):
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(text)
    assert message in str(caught.value)
