from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.schedule import (
    Instruction,
    Op,
    Schedule,
    ScheduleError,
    ScheduleKind,
    StageCost,
    Timeline,
    compile_schedule,
    parse_program,
    peak_in_flight,
    timeline,
)
from tests.schedule.strategies import schedules

# Whole numbers of seconds keep sums exact.
seconds = st.integers(0, 9).map(float)


@st.composite
def stage_costs(draw: st.DrawFn) -> StageCost:
    backward_s, activation_bytes = draw(seconds), draw(st.integers(0, 50))
    return StageCost(
        forward_s=draw(seconds),
        backward_s=backward_s,
        backward_weight_s=draw(st.none() | st.integers(0, int(backward_s)).map(float)),
        send_forward_s=draw(seconds),
        send_backward_s=draw(seconds),
        load_s=draw(seconds),
        reduce_s=draw(seconds),
        commit_s=draw(seconds),
        optimizer_s=draw(seconds),
        activation_bytes=activation_bytes,
        weight_activation_bytes=draw(st.none() | st.integers(0, activation_bytes)),
        static_bytes=draw(st.integers(0, 50)),
    )


@st.composite
def costed(draw: st.DrawFn) -> tuple[Schedule, list[StageCost]]:
    schedule = draw(schedules(max_microbatches=8))
    count = schedule.num_stages * schedule.num_chunks
    return schedule, draw(st.lists(stage_costs(), min_size=count, max_size=count))


def run(kind: ScheduleKind, num_stages: int, num_microbatches: int, num_chunks: int = 1, **cost: float) -> Timeline:
    schedule = compile_schedule(kind, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
    return timeline(schedule, [StageCost(**cost)] * (num_stages * num_chunks))


@given(case=costed())
def test_every_event_is_where_the_longest_path_through_its_causes_puts_it(case):
    schedule, costs = case
    found = timeline(schedule, costs)
    end_s = _longest_paths(schedule, costs)
    for stage, program in enumerate(schedule.programs):
        assert found.ends_s[stage] == (end_s(stage, len(program) - 1) if program else 0.0)
        at = {instruction: index for index, instruction in enumerate(program)}
        for span in found.spans[stage]:
            assert span.end_s == end_s(stage, at[span.instruction])


def _longest_paths(schedule: Schedule, costs: list[StageCost]):
    """Another way to the same times: each event asks for those that it waits for."""
    where = {
        (stage, instruction): index
        for stage, program in enumerate(schedule.programs)
        for index, instruction in enumerate(program)
    }
    depth = schedule.num_stages

    def cost_of(stage: int, instruction: Instruction) -> float:
        own = costs[stage::depth]
        if instruction.op in (Op.REDUCE_GRAD, Op.OPTIMIZER_STEP):
            return sum(cost.seconds_of(instruction.op) for cost in own)
        return own[instruction.chunk].seconds_of(instruction.op)

    def sender_of(stage: int, instruction: Instruction) -> tuple[int, Instruction]:
        step = -1 if instruction.op is Op.RECV_F else 1
        virtual = instruction.chunk * depth + stage + step
        op = Op.SEND_F if instruction.op is Op.RECV_F else Op.SEND_B
        return virtual % depth, Instruction(op, instruction.microbatch, virtual // depth)

    @cache
    def arrival_s(stage: int, index: int) -> float:
        program = schedule.programs[stage]
        instruction = program[index]
        # With two stages, the next and the previous one are the same: the operation tells the link.
        before = [i for i in range(index) if program[i].op is instruction.op]
        free_s = arrival_s(stage, before[-1]) if before else 0.0
        return max(end_s(stage, index), free_s) + cost_of(stage, instruction)

    @cache
    def end_s(stage: int, index: int) -> float:
        program = schedule.programs[stage]
        instruction = program[index]
        ready_s = end_s(stage, index - 1) if index else 0.0
        if instruction.op in (Op.SEND_F, Op.SEND_B):
            return ready_s
        if instruction.op in (Op.RECV_F, Op.RECV_B):
            source, send = sender_of(stage, instruction)
            return max(ready_s, arrival_s(source, where[source, send]))
        if instruction.op is Op.COMMIT:
            ready_s = max(end_s(each, len(schedule.programs[each]) - 3) for each in range(depth))
            return ready_s + max(cost.commit_s for cost in costs)
        return ready_s + cost_of(stage, instruction)

    return end_s


@given(case=costed())
def test_a_stage_and_a_link_do_one_thing_at_a_time(case):
    found = timeline(*case)
    by_link: dict[object, list[object]] = {}
    for transfer in found.transfers:
        by_link.setdefault(transfer.link, []).append(transfer)
    for line in (*found.spans, *by_link.values()):
        assert all(before.end_s <= after.start_s for before, after in pairwise(line))
        assert all(each.start_s < each.end_s for each in line)


@given(case=costed())
def test_memory_lies_between_the_parts_that_wait_for_the_weights_and_whole_activations(case):
    schedule, costs = case
    bytes_of = timeline(schedule, costs).peak_memory_bytes
    for stage, held in enumerate(peak_in_flight(schedule)):
        own = costs[stage :: schedule.num_stages]
        static = sum(cost.static_bytes for cost in own)
        assert static <= bytes_of[stage] <= static + held * max(cost.activation_bytes for cost in own)


def test_memory_is_exact_where_stages_are_equal():
    found = run(ScheduleKind.ONE_F_ONE_B, 3, 8, forward_s=1, backward_s=1, activation_bytes=10, static_bytes=7)
    assert found.peak_memory_bytes == (37, 27, 17)
    assert found.peak_in_flight == (3, 2, 1)


def test_what_only_the_weights_need_is_all_that_a_lagging_weight_gradient_holds():
    cost = {"forward_s": 1, "backward_s": 2, "activation_bytes": 10, "static_bytes": 7}
    lean = run(ScheduleKind.ZERO_BUBBLE, 3, 8, **cost, weight_activation_bytes=4)
    # The last stage holds one activation, and two inputs whose weight gradients wait.
    assert lean.peak_memory_bytes == (7 + 30, 7 + 20 + 4, 7 + 10 + 8)
    assert run(ScheduleKind.ZERO_BUBBLE, 3, 8, **cost).peak_memory_bytes == (37, 37, 37)


@given(num_stages=st.integers(1, 7), num_microbatches=st.integers(1, 16), forward_s=seconds, backward_s=seconds)
def test_equal_stages_take_the_textbook_time(num_stages, num_microbatches, forward_s, backward_s):
    for kind in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B):
        found = run(kind, num_stages, num_microbatches, forward_s=forward_s, backward_s=backward_s)
        assert found.makespan_s == (num_stages - 1 + num_microbatches) * (forward_s + backward_s)
        if forward_s + backward_s:
            expected = (num_stages - 1) / (num_stages - 1 + num_microbatches)
            assert found.bubble_share == pytest.approx(expected, abs=1e-12)


@given(
    forwards_s=st.lists(seconds, min_size=1, max_size=7), ratio=st.integers(0, 3), num_microbatches=st.integers(1, 20)
)
def test_1f1b_is_never_above_the_sum_and_the_slowest_where_backward_is_a_multiple_of_forward(
    forwards_s, ratio, num_microbatches
):
    work, found = one_f_one_b([(forward_s, ratio * forward_s) for forward_s in forwards_s], num_microbatches)
    assert num_microbatches * max(work) <= found.makespan_s <= sum(work) + (num_microbatches - 1) * max(work)


def test_1f1b_can_be_above_the_sum_and_the_slowest_where_the_multiples_differ():
    work, found = one_f_one_b([(0, 1), (1, 0), (0, 0)], num_microbatches=3)
    assert found.makespan_s == 5
    assert sum(work) + 2 * max(work) == 4


def one_f_one_b(costs: list[tuple[float, float]], num_microbatches: int) -> tuple[list[float], Timeline]:
    """The seconds of each stage for one microbatch, there and back, and the timeline."""
    schedule = compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=len(costs), num_microbatches=num_microbatches)
    found = timeline(schedule, [StageCost(forward_s=f, backward_s=b) for f, b in costs])
    return [forward_s + backward_s for forward_s, backward_s in costs], found


@given(num_stages=st.integers(2, 7), rounds=st.integers(1, 3), num_chunks=st.integers(2, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(num_stages, rounds, num_chunks):
    num_microbatches = rounds * num_stages
    found = run(ScheduleKind.INTERLEAVED, num_stages, num_microbatches, num_chunks, forward_s=1, backward_s=2)
    assert found.makespan_s == 3 * (num_microbatches * num_chunks + num_stages - 1)


@given(num_stages=st.integers(1, 7), extra=st.integers(0, 9), seconds_each=st.integers(1, 5))
def test_zero_bubble_leaves_a_third_of_the_bubble_where_all_three_parts_take_the_same(num_stages, extra, seconds_each):
    num_microbatches = num_stages + extra
    found = run(
        ScheduleKind.ZERO_BUBBLE, num_stages, num_microbatches, forward_s=seconds_each, backward_s=2 * seconds_each
    )
    # Qi et al., table 2: (p - 1) (T_F + T_B - T_W).
    assert found.makespan_s == (3 * num_microbatches + num_stages - 1) * seconds_each
    assert max(found.peak_in_flight) == num_stages


def test_sends_overlap_with_computation_and_queue_on_their_link():
    found = run(ScheduleKind.GPIPE, 2, 3, forward_s=1, backward_s=1, send_forward_s=2, send_backward_s=0)
    forwards = [(t.start_s, t.end_s) for t in found.transfers]
    assert forwards == [(1, 3), (3, 5), (5, 7)]
    assert [span.start_s for span in found.spans[0]][:3] == [0, 1, 2]
    assert [span.start_s for span in found.spans[1]][:3] == [3, 5, 7]


def test_a_commit_waits_for_the_slowest_reduction():
    schedule = compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=2, num_microbatches=1)
    quick = StageCost(forward_s=1, backward_s=1, commit_s=0.5, optimizer_s=1)
    slow = replace(quick, reduce_s=10, commit_s=0.25)
    found = timeline(schedule, [quick, slow])
    assert [(s.instruction.op, s.start_s) for s in found.spans[0]][-2:] == [(Op.COMMIT, 13), (Op.OPTIMIZER_STEP, 13.5)]
    assert found.compute_end_s == 4
    assert found.ends_s == (14.5, 14.5)
    assert found.makespan_s == 14.5


def test_a_step_without_microbatches_has_no_bubble():
    found = run(ScheduleKind.ONE_F_ONE_B, 2, 0, forward_s=1, backward_s=1, optimizer_s=3)
    assert (found.compute_end_s, found.bubble_share, found.makespan_s) == (0, 0, 3)


def test_a_deadlock_is_named_instead_of_timed():
    first, second = parse_program("load:0 forward:0 recv_b:0"), parse_program("load:0 recv_f:0")
    schedule = Schedule(kind=ScheduleKind.GPIPE, num_stages=2, num_microbatches=1, programs=(first, second))
    with pytest.raises(ScheduleError, match=r"stage 0, instruction 2 \(recv_b:0\): deadlock"):
        timeline(schedule, [StageCost(forward_s=1, backward_s=1)] * 2)


def test_each_virtual_stage_needs_a_cost():
    schedule = compile_schedule(ScheduleKind.INTERLEAVED, num_stages=2, num_microbatches=1, num_chunks=2)
    with pytest.raises(ScheduleError, match="2 costs for 4"):
        timeline(schedule, [StageCost(forward_s=1, backward_s=1)] * 2)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ({"forward_s": -1}, "forward_s is -1"),
        ({"reduce_s": float("nan")}, "reduce_s is nan"),
        ({"load_s": float("inf")}, "load_s is inf"),
        ({"static_bytes": -5}, "static_bytes is -5"),
        ({"backward_weight_s": 3}, r"backward_weight_s is 3; it is a part of backward_s \(2\)"),
    ],
)
def test_an_impossible_cost_is_named(cost, message):
    with pytest.raises(ScheduleError, match=message):
        StageCost(**({"forward_s": 1, "backward_s": 2} | cost))


def test_large_timelines_are_evaluated_in_seconds():
    schedule = compile_schedule(ScheduleKind.ONE_F_ONE_B, num_stages=64, num_microbatches=512)
    start = time.process_time()
    found = timeline(schedule, [StageCost(forward_s=1, backward_s=2)] * 64)
    assert time.process_time() - start < 10
    assert found.makespan_s == (63 + 512) * 3
