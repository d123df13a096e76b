"""Runs schedules on a toy model with real data, under arbitrary interleavings: what the checker is held against.

It shares no rule with the checker. Virtual stage v computes `3 x + v + 1`; messages carry values and no
labels, so that whatever goes to the wrong place, or comes twice, or too early, shows in the gradients.
"""

from __future__ import annotations

import random
from collections import deque

from oobleck.schedule import Instruction, Op, Schedule

SLOPE = 3


class Broken(Exception):
    """The schedule cannot be executed, or computes something else than the model's gradients."""


class Worker:
    """One stage: its stores, and what it does for each instruction."""

    def __init__(self, schedule: Schedule, stage: int) -> None:
        self.schedule = schedule
        self.stage = stage
        self.loaded: dict[int | None, int] = {}
        self.inputs: dict[tuple[int | None, int], int] = {}
        self.outputs: dict[tuple[int | None, int], int] = {}
        self.output_gradients: dict[tuple[int | None, int], int] = {}
        self.input_gradients: dict[tuple[int | None, int], int] = {}
        self.pending_weights: dict[tuple[int | None, int], tuple[int, int]] = {}
        self.weight_gradients: dict[int, int] = {}
        self.partial: dict[int | None, dict[int, int]] = {}
        """Gradients as they were at each commit, by the microbatch up to which it goes."""
        self.held = 0
        self.finished: list[Op] = []

    def compute(self, instruction: Instruction) -> None:
        key = instruction.microbatch, instruction.chunk
        virtual = instruction.chunk * self.schedule.num_stages + self.stage
        is_last = virtual == self.schedule.num_stages * self.schedule.num_chunks - 1
        match instruction.op:
            case Op.LOAD:
                self.loaded[instruction.microbatch] = 100 + (instruction.microbatch or 0)
            case Op.FORWARD:
                sample = self.loaded[instruction.microbatch]
                if virtual == 0:
                    self.inputs[key] = sample
                self.outputs[key] = SLOPE * self.inputs[key] + virtual + 1
                if is_last:
                    self.output_gradients[key] = sample
                self.held += 1
            case Op.BACKWARD | Op.BACKWARD_INPUT:
                gradient = self.output_gradients.pop(key)
                self.input_gradients[key] = SLOPE * gradient
                self.pending_weights[key] = (self.inputs.pop(key), gradient)
                if is_last:
                    del self.outputs[key]
                if instruction.op is Op.BACKWARD:
                    self._accumulate(key)
            case Op.BACKWARD_WEIGHT:
                self._accumulate(key)
            case Op.COMMIT_SECTION:
                self.partial[instruction.microbatch] = dict(self.weight_gradients)
            case tail:
                self.finished.append(tail)

    def _accumulate(self, key: tuple[int | None, int]) -> None:
        value, gradient = self.pending_weights.pop(key)
        self.weight_gradients[key[1]] = self.weight_gradients.get(key[1], 0) + value * gradient
        self.held -= 1


def execute(schedule: Schedule, *, seed: int, buffers: int = 1) -> tuple[int, ...]:
    """Run all programs, choosing by `seed` who goes next, and return the most activations each stage held.

    Raises `Broken` on deadlock, on a read of what is not there, and on wrong gradients.
    """
    choose = random.Random(seed).choice
    workers = [Worker(schedule, stage) for stage in range(schedule.num_stages)]
    position = [0] * schedule.num_stages
    links: dict[tuple[int, int, bool], deque[int]] = {}
    peak = [0] * schedule.num_stages
    while True:
        able = [w.stage for w in workers if _can_run(schedule, w.stage, position[w.stage], links, buffers)]
        if not able:
            break
        stage = choose(able)
        instruction = schedule.programs[stage][position[stage]]
        position[stage] += 1
        try:
            _run(workers[stage], instruction, links)
        except KeyError as error:
            raise Broken(f"stage {stage}: {instruction} misses {error}") from error
        peak[stage] = max(peak[stage], workers[stage].held)
    if any(at < len(program) for at, program in zip(position, schedule.programs, strict=True)):
        raise Broken(f"deadlock at {position}")
    _compare(schedule, workers)
    return tuple(peak)


def _link(schedule: Schedule, stage: int, instruction: Instruction) -> tuple[int, int, bool]:
    count = schedule.num_stages
    match instruction.op:
        case Op.SEND_F:
            return stage, (stage + 1) % count, True
        case Op.RECV_F:
            return (stage - 1) % count, stage, True
        case Op.SEND_B:
            return stage, (stage - 1) % count, False
        case _:
            return (stage + 1) % count, stage, False


def _can_run(
    schedule: Schedule, stage: int, position: int, links: dict[tuple[int, int, bool], deque[int]], buffers: int
) -> bool:
    if position == len(schedule.programs[stage]):
        return False
    instruction = schedule.programs[stage][position]
    queue = links.setdefault(_link(schedule, stage, instruction), deque())
    if instruction.op in (Op.SEND_F, Op.SEND_B):
        return len(queue) < buffers
    return bool(queue) or instruction.op not in (Op.RECV_F, Op.RECV_B)


def _run(worker: Worker, instruction: Instruction, links: dict[tuple[int, int, bool], deque[int]]) -> None:
    key = instruction.microbatch, instruction.chunk
    link = _link(worker.schedule, worker.stage, instruction)
    match instruction.op:
        case Op.SEND_F:
            links[link].append(worker.outputs.pop(key))
        case Op.SEND_B:
            links[link].append(worker.input_gradients.pop(key))
        case Op.RECV_F:
            worker.inputs[key] = links[link].popleft()
        case Op.RECV_B:
            worker.output_gradients[key] = links[link].popleft()
        case _:
            worker.compute(instruction)


def _compare(schedule: Schedule, workers: list[Worker]) -> None:
    expected = _gradients(schedule, schedule.num_microbatches)
    for worker in workers:
        found = [worker.weight_gradients.get(chunk, 0) for chunk in range(schedule.num_chunks)]
        if found != expected[worker.stage :: schedule.num_stages]:
            raise Broken(f"stage {worker.stage} has wrong gradients")
        if worker.partial.keys() != workers[0].partial.keys():
            raise Broken(f"stage {worker.stage} commits other microbatches than stage 0")
        for microbatch, partial in worker.partial.items():
            assert microbatch is not None
            if partial.get(0, 0) != _gradients(schedule, microbatch + 1)[worker.stage]:
                raise Broken(f"stage {worker.stage} commits wrong gradients")
        if worker.held or worker.finished != workers[0].finished:
            raise Broken(f"stage {worker.stage} ends with {worker.held} activations after {worker.finished}")


def _gradients(schedule: Schedule, num_microbatches: int) -> list[int]:
    """The sums of the first microbatches' gradients, by virtual stage."""
    depth = schedule.num_stages * schedule.num_chunks
    expected = [0] * depth
    for microbatch in range(num_microbatches):
        value = 100 + microbatch
        for virtual in range(depth):
            expected[virtual] += value * (100 + microbatch) * SLOPE ** (depth - 1 - virtual)
            value = SLOPE * value + virtual + 1
    return expected
