"""Executes the compiled program of one stage, instruction by instruction.

Nothing is decided here: the program says what is computed, received and sent, and in which order. Receives are
posted ahead by helper threads in the program's own order, so that a tensor is often there before it is asked
for; sends are posted and forgotten until the step is committed, by which time every receiver has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from oobleck.control.commit import Interrupted
from oobleck.planner import WorkerId
from oobleck.schedule import Instruction, Op, Program, ScheduleKind
from oobleck.training.comm import Group, Inbox, Pending, Waiter
from oobleck.training.data import NO_SAMPLE, Batch, Dataset
from oobleck.training.model import MicrobatchKey, StageModel, WeightGradients

__all__ = ["PipelineRank", "SectionCommitter", "StepWork", "execute"]

_GRADIENT_OPS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRank:
    """The pipeline as one of its stages sees it: who comes before and after, and the group that links them."""

    stage: int
    num_stages: int
    group: Group | None
    """None for a pipeline of one worker."""
    rank: int = 0
    """Which of the devices that share the stage this is."""
    degree: int = 1
    """How many share each stage."""
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B

    def member(self, stage: int) -> int:
        """The neighbour at another stage, as the group counts: the device of like rank."""
        return stage * self.degree + self.rank

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


@dataclass(slots=True, kw_only=True)
class StepWork:
    """What this worker has done of the step in flight. Gradients are in the parameters' `grad`."""

    step: int
    samples: Sequence[int]
    """Indices of the step's samples, over all pipelines."""
    seed: int
    microbatch_size: int
    num_items: int
    """Predicted tokens in the step: what its loss is averaged over."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Its microbatches' losses, on the device; on last stages only."""
    counts: dict[int, int] = field(default_factory=dict)
    """How often each microbatch went through, noted by first stages, where it ends."""
    sends: list[tuple[Pending, torch.Tensor]] = field(default_factory=list)
    """Posted sends and what they read from."""

    @property
    def num_samples(self) -> int:
        """Samples in the step: the last one may have fewer than others."""
        return sum(index != NO_SAMPLE for index in self.samples)

    @property
    def loss(self) -> float:
        """Its share of the step's loss. Waits for the device."""
        return sum(torch.stack(self.losses).tolist()) if self.losses else 0.0

    def samples_of(self, microbatch: int) -> Sequence[int]:
        first = microbatch * self.microbatch_size
        return self.samples[first : first + self.microbatch_size]


class SectionCommitter(Protocol):
    """Commits what is done of a step beside what follows."""

    def begin(self, work: StepWork) -> None:
        """Take what is done. Raises Interrupted where the pipeline is stopped."""

    def look(self) -> None:
        """Move on with what was taken. Never blocks, raises nothing."""

    def look_until(
        self, ready: Callable[[], bool], interrupted: Callable[[], bool], waits_for: Iterable[WorkerId]
    ) -> None:
        """Move on while waiting for something else, as long as there is reason to. Raises Interrupted."""


def execute(
    program: Program,
    microbatches: Sequence[int],
    *,
    work: StepWork,
    model: StageModel,
    dataset: Dataset,
    pipeline_rank: PipelineRank,
    on_backward: Callable[[], None],
    around_last: AbstractContextManager[object],
    put_off: WeightGradients | None,
    committer: SectionCommitter | None,
    waiter: Waiter,
    interrupted: Callable[[], bool],
) -> None:
    """Run a stage's program for the given microbatches, adding to `work` and to the gradients.

    The program's positions 0 .. m-1 stand for `microbatches`, the step's own numbers. The instructions that
    end a step (reduce, commit, apply) are not this function's: it stops before them. `around_last` is entered for
    the backward pass after which gradients are final; `put_off` is what the model puts off to BACKWARD_WEIGHT, if it
    does; `commit_section` is looked after between instructions where the program has sections.

    Raises Interrupted once `interrupted()`, PeerLost when a neighbour is gone; gradients are then partial.
    """
    execution = _Execution(
        program, microbatches, work, model, dataset, pipeline_rank, on_backward, put_off, committer, waiter, interrupted
    )
    execution.run(around_last)


class _Execution:
    def __init__(
        self,
        program: Program,
        microbatches: Sequence[int],
        work: StepWork,
        model: StageModel,
        dataset: Dataset,
        pipeline_rank: PipelineRank,
        on_backward: Callable[[], None],
        put_off: WeightGradients | None,
        committer: SectionCommitter | None,
        waiter: Waiter,
        interrupted: Callable[[], bool],
    ) -> None:
        self._program = program
        self._microbatches = microbatches
        self._work = work
        self._model = model
        self._dataset = dataset
        self._pipeline_rank = pipeline_rank
        self._on_backward = on_backward
        self._put_off = put_off
        self._committer = committer
        self._interrupted = interrupted
        self._batches: dict[int, Batch] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._output_gradients: dict[int, torch.Tensor] = {}
        self._forwards = self._expect(Op.RECV_F, pipeline_rank.member(pipeline_rank.stage - 1), waiter)
        self._backwards = self._expect(Op.RECV_B, pipeline_rank.member(pipeline_rank.stage + 1), waiter)
        self._steps: dict[Op, Callable[[int], None]] = {
            Op.LOAD: self._load,
            Op.RECV_F: self._receive_forward,
            Op.FORWARD: self._forward,
            Op.SEND_F: self._send_forward,
            Op.RECV_B: self._receive_backward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND_B: self._send_backward,
            Op.COMMIT_SECTION: self._begin_section,
        }

    def run(self, around_last: AbstractContextManager[object]) -> None:
        backwards = [at for at, instruction in enumerate(self._program) if instruction.op in _GRADIENT_OPS]
        last = backwards[-1] if backwards else None
        for at, instruction in enumerate(self._program):
            if instruction.op.is_tail:
                break
            with around_last if at == last else nullcontext():
                self._steps[instruction.op](_position(instruction))
            if self._committer is not None:
                self._committer.look()

    def _expect(self, op: Op, source: int, waiter: Waiter) -> Inbox | None:
        """Have all messages of one direction received, in the program's order."""
        positions = [_position(instruction) for instruction in self._program if instruction.op is op]
        if not positions:
            return None
        assert self._pipeline_rank.group is not None
        inbox = self._pipeline_rank.group.inbox(source, waiter)
        post = self._receive_from(source)
        for position in positions:
            inbox.expect(self._tag(op, position), post)
        return inbox

    def _receive_from(self, source: int) -> Callable[[int], tuple[Pending, torch.Tensor]]:
        group, structure = self._pipeline_rank.group, self._model.structure
        assert group is not None
        shape = (self._work.microbatch_size, structure.sequence_length, structure.hidden_size)
        dtype, device = self._model.hidden_dtype, self._model.device

        def post(tag: int) -> tuple[Pending, torch.Tensor]:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            return group.post_receive(tensor, source, tag), tensor

        return post

    def _tag(self, op: Op, position: int) -> int:
        return 2 * self._microbatches[position] + (op in (Op.SEND_B, Op.RECV_B))

    def _check(self) -> None:
        """Computation is not interruptible; look once for each piece of it."""
        if self._interrupted():
            raise Interrupted

    def _take(self, inbox: Inbox | None) -> torch.Tensor:
        assert inbox is not None
        if self._committer is not None:
            self._committer.look_until(inbox.has_arrived, self._interrupted, [inbox.source])
        return inbox.take(self._interrupted)

    def _load(self, position: int) -> None:
        self._check()
        batch = self._dataset.batch(self._work.samples_of(self._microbatches[position]), step=self._work.step)
        self._batches[position] = batch.to(self._model.device)

    def _receive_forward(self, position: int) -> None:
        self._inputs[position] = self._take(self._forwards).requires_grad_()

    def _forward(self, position: int) -> None:
        self._outputs[position] = self._model.forward(
            self._batches.pop(position),
            self._inputs.get(position),
            num_items=self._work.num_items,
            key=MicrobatchKey(seed=self._work.seed, step=self._work.step, microbatch=self._microbatches[position]),
        )

    def _send_forward(self, position: int) -> None:
        self._send(Op.SEND_F, position, self._outputs[position].detach(), self._pipeline_rank.stage + 1)

    def _receive_backward(self, position: int) -> None:
        self._output_gradients[position] = self._take(self._backwards)

    def _backward(self, position: int) -> None:
        self._backward_input(position)
        self._backward_weight(position)

    def _backward_input(self, position: int) -> None:
        """Take a microbatch backward; weights that are put off are not done then, all others are."""
        self._check()
        if self._put_off is not None:
            self._put_off.begin(position)
        output = self._outputs.pop(position)
        if self._pipeline_rank.is_last:
            self._work.losses.append(output.detach())
            output.backward()  # type: ignore[no-untyped-call]
        else:
            output.backward(self._output_gradients.pop(position))  # type: ignore[no-untyped-call]

    def _backward_weight(self, position: int) -> None:
        if self._put_off is not None:
            self._put_off.finish(position)
        self._on_backward()
        if self._pipeline_rank.is_first:
            microbatch = self._microbatches[position]
            self._work.counts[microbatch] = self._work.counts.get(microbatch, 0) + 1

    def _send_backward(self, position: int) -> None:
        gradient = self._inputs.pop(position).grad
        assert gradient is not None
        self._send(Op.SEND_B, position, gradient, self._pipeline_rank.stage - 1)

    def _begin_section(self, _position: int) -> None:
        assert self._committer is not None, "a program with sections needs a partial commit"
        self._committer.begin(self._work)

    def _send(self, op: Op, position: int, tensor: torch.Tensor, target: int) -> None:
        assert self._pipeline_rank.group is not None
        tensor = tensor.contiguous()
        self._work.sends.append(
            (
                self._pipeline_rank.group.send(tensor, self._pipeline_rank.member(target), self._tag(op, position)),
                tensor,
            )
        )


def _position(instruction: Instruction) -> int:
    assert instruction.microbatch is not None, instruction
    return instruction.microbatch
