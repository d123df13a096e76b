"""Executes the compiled program of one stage, instruction by instruction.

This module decides nothing: the program says what is computed, received and sent, and in which order. Receives are
posted ahead by helper threads in the program's own order, so that a tensor is often there before it is asked
for; sends are posted and forgotten, and where nobody else keeps what they send, kept until the step is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from oobleck.control.commit import CommitState, Interrupted
from oobleck.schedule import Instruction, Op, Program
from oobleck.training.comm import DeviceWork, Inbox, Pending
from oobleck.training.data import Batch
from oobleck.training.model import StageModel, WeightGradients

from .sections import SectionSums
from .step_work import GlobalBatch, PipelineRank, StepWork

__all__ = ["Execution"]

_GRADIENT_OPS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
_COMPUTING_OPS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


class Execution:
    """Runs one program for some microbatches of a step. What is in flight is kept by microbatch number in the step."""

    def __init__(
        self,
        batch: GlobalBatch,
        work: StepWork,
        pipeline_rank: PipelineRank,
        model: StageModel,
        commit_state: CommitState,
        *,
        put_off: WeightGradients | None,
        sections: SectionSums | None,
        device_work: DeviceWork | None,
    ) -> None:
        """`work` is added to. `put_off` is what the model puts off to BACKWARD_WEIGHT, if it does; `sections` are
        looked after between instructions where the program has some; `device_work` times what a GPU computes.
        """
        self._batch = batch
        self._work = work
        self._pipeline_rank = pipeline_rank
        self._model = model
        self._commit_state = commit_state
        self._put_off = put_off
        self._sections = sections
        self._device_work = device_work
        self._interrupted = commit_state.is_pipeline_stopped
        self._batches: dict[int, Batch] = {}
        self._num_items: dict[int, int] = {}
        """Counted tokens of what was loaded, where losses are reported."""
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._output_gradients: dict[int, torch.Tensor] = {}
        self._forwards: Inbox | None = None
        self._backwards: Inbox | None = None
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

    def run(
        self, program: Program, microbatches: Sequence[int], *, around_last: AbstractContextManager[object]
    ) -> None:
        """Run a stage's program, adding to the work and to the gradients.

        The program's positions 0 .. m-1 stand for `microbatches`, the step's own numbers. The instructions that
        end a step (reduce, commit, apply) are not run here: it stops before them. `around_last` is entered for the
        backward pass after which gradients are final.

        Raises Interrupted once the pipeline is stopped, PeerLost when a neighbour is gone, ShardUnreadable; gradients
        are then partial.
        """
        stage = self._pipeline_rank.stage
        self._forwards = self._expect(Op.RECV_F, program, microbatches, stage - 1)
        self._backwards = self._expect(Op.RECV_B, program, microbatches, stage + 1)
        last = max((at for at, instruction in enumerate(program) if instruction.op in _GRADIENT_OPS), default=None)
        if self._device_work is not None:
            self._device_work.begin()
        with self._model.casting_once():
            for at, instruction in enumerate(program):
                if instruction.op.is_tail:
                    break
                with around_last if at == last else nullcontext(), self._timing(instruction.op):
                    self._steps[instruction.op](microbatches[_position(instruction)])
                if self._sections is not None:
                    self._sections.look()

    def _timing(self, op: Op) -> AbstractContextManager[object]:
        return self._device_work.piece() if self._device_work is not None and op in _COMPUTING_OPS else nullcontext()

    def _expect(self, op: Op, program: Program, microbatches: Sequence[int], stage: int) -> Inbox | None:
        """Have all messages of one direction received, in the program's order."""
        expected = [microbatches[_position(instruction)] for instruction in program if instruction.op is op]
        if not expected:
            return None
        group, source, structure = self._pipeline_rank.group, self._pipeline_rank.member(stage), self._model.structure
        assert group is not None
        shape = (self._batch.microbatch_size, structure.sequence_length, structure.hidden_size)

        def post(tag: int) -> tuple[Pending, torch.Tensor]:
            return group.post_receive_ahead(shape, self._model.hidden_dtype, self._model.device, source, tag)

        inbox = group.inbox(source)
        for microbatch in expected:
            inbox.expect(_tag(op, microbatch), post)
        return inbox

    def _check(self) -> None:
        """Raise Interrupted if the pipeline is stopped; called before each piece, as none can be interrupted."""
        if self._interrupted():
            raise Interrupted

    def _take(self, inbox: Inbox | None) -> torch.Tensor:
        assert inbox is not None
        if self._sections is not None:
            self._sections.look_until(inbox.has_arrived, self._interrupted, [inbox.source])
        return inbox.take(self._interrupted)

    def _load(self, microbatch: int) -> None:
        self._check()
        batch = self._batch.load(microbatch)
        if self._pipeline_rank.is_last and self._pipeline_rank.reports:
            self._num_items[microbatch] = batch.num_items
        self._batches[microbatch] = batch.to(self._model.device)

    def _receive_forward(self, microbatch: int) -> None:
        self._inputs[microbatch] = self._take(self._forwards).requires_grad_()

    def _forward(self, microbatch: int) -> None:
        self._outputs[microbatch] = self._model.forward(
            self._batches.pop(microbatch),
            self._inputs.get(microbatch),
            num_items=self._batch.divisor,
            key=self._batch.key(microbatch),
        )

    def _send_forward(self, microbatch: int) -> None:
        self._send(Op.SEND_F, microbatch, self._outputs[microbatch].detach(), self._pipeline_rank.stage + 1)

    def _receive_backward(self, microbatch: int) -> None:
        self._output_gradients[microbatch] = self._take(self._backwards)

    def _backward(self, microbatch: int) -> None:
        self._backward_input(microbatch)
        self._backward_weight(microbatch)

    def _backward_input(self, microbatch: int) -> None:
        """Take a microbatch backward, with all gradients but those of weights that are put off."""
        self._check()
        if self._put_off is not None:
            self._put_off.begin(microbatch)
        output, gradient = self._outputs.pop(microbatch), self._output_gradients.pop(microbatch, None)
        if self._pipeline_rank.is_last and self._pipeline_rank.reports:
            self._work.losses.append(output.detach())
            self._work.num_items += self._num_items.pop(microbatch)
        if output.requires_grad:  # not so on a first stage that trains nothing
            output.backward(gradient)  # type: ignore[no-untyped-call]

    def _backward_weight(self, microbatch: int) -> None:
        if self._put_off is not None:
            self._put_off.finish(microbatch)
        self._commit_state.note_microbatch()
        if self._pipeline_rank.is_first and self._pipeline_rank.reports:
            self._work.counted.append(microbatch)

    def _send_backward(self, microbatch: int) -> None:
        gradient = self._inputs.pop(microbatch).grad
        assert gradient is not None
        self._send(Op.SEND_B, microbatch, gradient, self._pipeline_rank.stage - 1)

    def _begin_section(self, _microbatch: int) -> None:
        assert self._sections is not None, "a program with sections needs their sums"
        self._sections.begin(self._work)

    def _send(self, op: Op, microbatch: int, tensor: torch.Tensor, target: int) -> None:
        group, member = self._pipeline_rank.group, self._pipeline_rank.member(target)
        assert group is not None
        tensor = tensor.contiguous()
        if (pending := group.send_off(tensor, member, _tag(op, microbatch))) is not None:
            self._work.sends.append((pending, tensor))


def _position(instruction: Instruction) -> int:
    assert instruction.microbatch is not None, instruction
    return instruction.microbatch


def _tag(op: Op, microbatch: int) -> int:
    return 2 * microbatch + (op in (Op.SEND_B, Op.RECV_B))
